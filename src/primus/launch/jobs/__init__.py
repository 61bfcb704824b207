"""Jobs that were submitted to a scheduler: records, states, logs."""
