"""A step that is observed while an engine executes it, on fake tensors or on real ones."""
