"""What launchers decide: layout, attempts, ends, failing hosts. The scripts of launch/ start what it says."""
