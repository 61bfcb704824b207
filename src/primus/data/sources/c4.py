"""C4, English web text (hub, ODC-BY): c4:en by default; others: c4:realnewslike, c4:en.noclean."""

from primus.data.source import HubDataset

DATASET = HubDataset(
    repo="allenai/c4",
    files={
        "en": "en/c4-{split}.*.json.gz",
        "en.*": "{config}/c4-{split}.*.json.gz",
        "realnewslike": "realnewslike/c4-{split}.*.json.gz",
    },
    text="text",
)
