"""The report of a comparison: as a value, as tables, as a page, and its files."""
