"""BookCorpus, sentences of novels (hub): the parquet files of the Hub, because the dataset itself is a script."""

from primus.data.source import HubDataset

DATASET = HubDataset(repo="bookcorpus/bookcorpus", text="text")
