"""Checkpoints as folders: their names, their manifests and what they fit; no tensor library is imported here."""
