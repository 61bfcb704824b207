"""Tasks on training data."""
