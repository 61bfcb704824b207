"""Train a model from an experiment file."""
