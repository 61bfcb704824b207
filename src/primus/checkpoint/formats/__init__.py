"""Checkpoint formats: each has a reader and a writer of tensors by name; they meet in hub names."""
