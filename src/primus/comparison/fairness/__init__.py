"""Whether two results are fair to compare: what they state, the rules, and a check of each fact."""
