"""Checks of one node without load, by subject; each yields findings."""
