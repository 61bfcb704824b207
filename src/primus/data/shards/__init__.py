"""Work in shards that any number of processes share, and what reads and writes documents in it."""
