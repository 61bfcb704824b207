"""Filters documents: cleaning by rules, and removal of duplicates."""
