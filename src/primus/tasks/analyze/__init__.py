"""Analyze machines, runs and traces."""
