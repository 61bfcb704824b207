"""Leave documents out: cleaning by rules, and removal of duplicates."""
