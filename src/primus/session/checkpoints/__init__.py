"""Checkpoints of a training run: written, found, loaded, and set aside after a rewind."""
