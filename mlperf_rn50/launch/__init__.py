"""Launchers: layout of the ranks, attempts, exit codes and failed hosts. The scripts in launch/ run
this package."""
