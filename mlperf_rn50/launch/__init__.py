"""What launchers decide: layout, attempts, ends, failing hosts, regrouping. The scripts of launch/ start what it says."""
