"""Show the hooks of tasks."""
