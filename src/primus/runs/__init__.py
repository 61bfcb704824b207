"""Run folders: the record of a run, and the only channel between planning, nodes, workers and later tools."""
