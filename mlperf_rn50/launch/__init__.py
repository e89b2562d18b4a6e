"""What launchers decide."""
