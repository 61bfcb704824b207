"""The variables that a node of this kind gets."""
