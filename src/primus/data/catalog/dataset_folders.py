"""Names of the folders of a dataset in the data folder."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path


def find_dataset_folder(data_path: Path, dataset: str, split: str) -> Path:
    """Default folder of a dataset of the hub in the data folder."""
    return Path(os.path.expanduser(data_path)) / name_dataset_folder(dataset) / f"raw-{_name_split_folder(split)}"


def _name_split_folder(split: str) -> str:
    """A split as part of a folder name, without special characters of shells and patterns."""
    if re.fullmatch(r"[\w.-]+", split):
        return split
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', split).strip('-')}-{hashlib.sha256(split.encode()).hexdigest()[:8]}"


def name_dataset_folder(dataset: str) -> str:
    """Folder name of a dataset: ``owner--name-config`` for ``OWNER/NAME:CONFIG``."""
    return dataset.lower().replace("_", "-").replace("/", "--").replace(":", "-")
