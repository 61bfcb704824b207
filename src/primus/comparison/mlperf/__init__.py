"""MLPerf: the log of a run for its checker, and the check of convergence."""
