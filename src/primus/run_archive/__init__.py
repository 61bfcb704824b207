"""Archives of runs: one file with everything that another person needs to repeat a run."""
