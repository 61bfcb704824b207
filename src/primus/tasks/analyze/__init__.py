"""Look at machines, runs and traces."""
