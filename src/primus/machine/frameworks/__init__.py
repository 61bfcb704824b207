"""Backends' variables by their parallel layout; each file is a plug-in with LIBRARIES and settings."""
