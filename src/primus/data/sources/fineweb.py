"""FineWeb, English web text (hub, ODC-BY): the sample of 10 billion tokens; fineweb:default is everything."""

from primus.data.source import HubDataset

DATASET = HubDataset(
    repo="HuggingFaceFW/fineweb",
    files={
        "sample-10BT": "sample/10BT/*.parquet",
        "sample-100BT": "sample/100BT/*.parquet",
        "sample-350BT": "sample/350BT/*.parquet",
        "CC-MAIN-*": "data/{config}/*.parquet",
        "default": "data/*/*.parquet",
    },
    text="text",
)
