"""The data of a run, and the batches of its steps."""
