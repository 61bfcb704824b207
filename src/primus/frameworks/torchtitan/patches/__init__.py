"""Patches of upstream packages that this framework needs; each file is a plug-in."""
