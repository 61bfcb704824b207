"""Show, check and start experiment files."""
