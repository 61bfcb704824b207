"""The report of a run: what it did, where its time went, what limits it, and what to change."""
