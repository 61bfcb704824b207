"""Run folders: what a run leaves behind, and the only channel between planning, node, workers and later tools."""
