"""One result as a file, and what makes one: a run, a log of another framework, a file of tprimat."""
