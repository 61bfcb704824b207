"""Prepare a dataset from end to end: fetch, clean, deduplicate, encode, verify."""
