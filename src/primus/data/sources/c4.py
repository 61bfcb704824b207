"""C4, English web text (hub, ODC-BY); c4:en unless another, such as c4:realnewslike, is named."""

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
