"""What launchers decide: layout, attempts, ends, blame, regrouping. The scripts of launch/ start what it says."""
