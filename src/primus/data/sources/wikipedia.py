"""Wikipedia of November 2023 (hub, CC BY-SA): English; for another language: wikipedia:20231101.de."""

from primus.data.source import HubDataset

DATASET = HubDataset(
    repo="wikimedia/wikipedia",
    files={"20231101.en": "20231101.en/{split}-*.parquet", "20231101.*": "{config}/{split}-*.parquet"},
    text="text",
)
