"""Removal of exact and near-duplicates."""
