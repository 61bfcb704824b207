"""The machine: facts that are read, never changed."""
