"""Where a tokenizer's name leads: to a file, a folder, a name on the hub, or one of tiktoken's encodings."""

from __future__ import annotations

from pathlib import Path

from primus.data.tokenizers import hub
from primus.errors import UsageError

FILES = "a tokenizer.json, a SentencePiece .model, a .tiktoken file, a folder that has one, or a hub name"


def read(name: str) -> bytes:
    """Content of the tokenizer that `name` names: a tokenizer.json or a SentencePiece model.

    Raises:
        UsageError: There is no such tokenizer.
        PrimusError: The hub cannot be reached.
    """
    path = _local_file(Path(name).expanduser()) or hub.tokenizer_file(name)
    return path.read_bytes()


def _local_file(path: Path) -> Path | None:
    """The tokenizer's file at `path`; None where `path` can only be a name on the hub.

    Raises:
        UsageError: `path` is local, but there is no tokenizer.
    """
    if path.is_file():
        return path
    if path.is_dir():
        file = path / "tokenizer.json"
        if file.is_file():
            return file
        raise UsageError(
            f"{path}: no tokenizer.json in this folder",
            "with transformers: AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)",
        )
    if path.is_absolute() or path.suffix == ".json" or len(path.parts) > 2 or path.parts[:1] in ((".",), ("..",)):
        raise UsageError(f"{path}: no such tokenizer", f"give {FILES}")
    return None
