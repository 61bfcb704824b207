"""Process input in shards that any number of processes share; open inputs and write documents."""
