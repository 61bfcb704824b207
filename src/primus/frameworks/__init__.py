"""Backends: training engines; each file or package is a plug-in."""
