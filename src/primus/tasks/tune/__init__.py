"""Tasks that search for faster settings."""
