"""Checks of token files."""
