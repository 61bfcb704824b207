"""The device of a process: its memory, its limits, and its state under load."""
