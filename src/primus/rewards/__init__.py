"""Rewards that come with the package, each named in an experiment by its file's name."""
