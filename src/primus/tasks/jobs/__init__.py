"""Tasks for jobs of a scheduler."""
