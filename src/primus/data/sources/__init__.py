"""Named datasets, one file each.

A source has ``documents() -> Iterator[str]``, which yields the same texts in the same order each time, and may have
``version() -> str``, which changes when they do. The first line of its docstring is its summary.
"""
