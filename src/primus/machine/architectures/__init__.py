"""Architectures, and the vendors' bases below them; each file is a plug-in with LAYER."""
