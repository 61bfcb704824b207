"""Named datasets, one file each, in one of two shapes. The first line of a docstring is its summary.

A local source has ``documents() -> Iterator[str]``, which yields the same texts in the same order each time. It may
have ``version() -> str``, which changes with the texts. A dataset of the Hugging Face Hub has
``DATASET = HubDataset(...)``, which declares the location of its files; it is fetched before it is read.
"""
