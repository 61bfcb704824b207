"""Named datasets, one file each, in one of two shapes. The first line of a docstring is its summary.

A source of its own has ``documents() -> Iterator[str]``, which yields the same texts in the same order each time, and
may have ``version() -> str``, which changes when they do. A dataset of the Hugging Face hub has
``DATASET = HubDataset(...)``, which says where its files are; it is fetched before it is read.
"""
