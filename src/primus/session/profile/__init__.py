"""Profiles of a window of steps."""
