"""Everything that can be wrong with token files."""
