"""Folders of checkpoints: names, manifests and compatibility with a model; imports no tensor library."""
