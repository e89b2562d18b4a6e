"""What launchers decide: how ranks are started, watched, ended and started again."""
