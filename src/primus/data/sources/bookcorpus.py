"""BookCorpus, sentences of novels (hub), from the hub's parquet files because the dataset is a program."""

from primus.data.source import HubDataset

DATASET = HubDataset(repo="bookcorpus/bookcorpus", text="text")
