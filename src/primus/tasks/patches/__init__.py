"""Show patches."""
