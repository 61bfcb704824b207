"""Environment variables of a node."""
