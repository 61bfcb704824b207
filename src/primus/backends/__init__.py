"""Backends: what trains; each file or package is a plug-in."""
