"""Tasks about jobs that were given to a scheduler."""
