"""Platforms, frameworks and models compared: cells of a matrix, their runs and their results."""
