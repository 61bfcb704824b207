"""The ranks of a run: their devices, the values that they exchange, and the errors of their engines."""
