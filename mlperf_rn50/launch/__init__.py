"""Launchers: layout of the ranks, attempts, exit codes, failed hosts. The scripts in launch/ start the processes."""
