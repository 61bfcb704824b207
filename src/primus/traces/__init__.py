"""Traces of profilers: reader, intervals, and what they say about where the time goes."""
