"""Patches of upstream packages; each file is a plug-in with PATCH and `apply()`."""
