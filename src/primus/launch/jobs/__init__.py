"""Jobs that a scheduler runs: their states and their logs."""
