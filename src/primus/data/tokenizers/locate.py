"""Resolve the name of a tokenizer: a file, a folder, a name on the hub, or a tiktoken encoding."""

from __future__ import annotations

import os
from pathlib import Path

from primus.config.text_file import check_has_end
from primus.data.tokenizers import byte_level, tiktoken
from primus.data.tokenizers.content import is_json
from primus.data.tokenizers.document_ends import DeclaredEnd, find_declared
from primus.data.tokenizers.sibling_files import open_siblings
from primus.errors import UsageError
from primus.web import hub

FILES = "a tokenizer.json, a SentencePiece .model, a .tiktoken file, a folder that has one, or a hub name"
FOLDER_FILE = "tokenizer.json"
PAIR = ("vocab.json", "merges.txt")


def read_tokenizer(name: str) -> bytes:
    """Read the content of a tokenizer: a tokenizer.json or a SentencePiece model.

    Raises:
        UsageError: The tokenizer does not exist.
        PrimusError: The hub cannot be reached.
    """
    if name.startswith(tiktoken.PREFIX):
        return tiktoken.read_encoding(name)
    vocabulary, comma, merges = name.partition(",")
    if comma:
        return _read_pair(Path(os.path.expanduser(vocabulary)), Path(os.path.expanduser(merges)))
    path = Path(os.path.expanduser(name))
    if path.is_dir() and not (path / "tokenizer.json").is_file() and all((path / file).is_file() for file in PAIR):
        return _read_pair(path / PAIR[0], path / PAIR[1])
    path = _find_local_file(path, name) or hub.download_file(name, FOLDER_FILE, "model")
    content = path.read_bytes()
    if tiktoken.is_rank_file(content):
        return tiktoken.convert_ranks(content, str(path))
    if path.suffix == ".json" and not is_json(content):
        raise UsageError(f"{name}: not a tokenizer.json", "save or download it again")
    return content


def find_declared_end(name: str, ask_hub: bool) -> DeclaredEnd | None:
    """Find the end-of-text token that the files next to a tokenizer declare; None if they declare none.

    Args:
        name: The tokenizer.
        ask_hub: Whether to download files from the hub that are not in the local cache.

    Raises:
        UsageError: A file is damaged.
    """
    if name.startswith(tiktoken.PREFIX) or "," in name:
        return None
    path = Path(os.path.expanduser(name))
    if path.is_file() and path.name not in (FOLDER_FILE, "tokenizer.model"):  # not of the folder that it is in
        return None
    where = str(path if path.is_dir() else path.parent) if path.exists() else name
    return find_declared(open_siblings(name, ask_hub=ask_hub), where)


def is_local(name: str) -> bool:
    """Whether `name` is a file, a folder or a pair of files on this machine, not a public name."""
    file = name.partition(":")[2].partition(":")[2] if name.startswith(tiktoken.PREFIX) else name.partition(",")[0]
    return bool(file) and Path(os.path.expanduser(file)).exists()


def _find_local_file(path: Path, name: str) -> Path | None:
    """Find the tokenizer's file at `path`; None if `path` can only be a name on the hub.

    Raises:
        UsageError: `path` is local, but does not contain a tokenizer.
    """
    check_has_end(path, str(path))
    if path.is_file():
        return path
    if path.is_dir():
        return _find_in_folder(path)
    known = path.suffix in (".json", ".model", ".tiktoken")
    if path.is_absolute() or known or len(path.parts) > 2 or name.startswith("."):
        raise UsageError(f"{path}: no such tokenizer", f"give {FILES}")
    return None


def _find_in_folder(folder: Path) -> Path:
    """Find the tokenizer.json of a folder, or else its only SentencePiece model or .tiktoken file."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return file
    found = sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{folder}: several tokenizers: {', '.join(path.name for path in found)}", "give the path of one"
        )
    raise UsageError(
        f"{folder}: no tokenizer.json in this folder, nor a SentencePiece model, nor a .tiktoken file",
        "with transformers: AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)",
    )


def _read_pair(vocabulary: Path, merges: Path) -> bytes:
    """Convert the files of Megatron's GPT2BPETokenizer, ``vocab.json`` and ``merges.txt``, to a tokenizer.json."""
    for path in (vocabulary, merges):
        if not path.is_file():
            raise UsageError(f"{path}: no such file", "give VOCAB.json,MERGES.txt")
    try:
        return byte_level.from_vocabulary(vocabulary.read_bytes(), merges.read_bytes())
    except ValueError as error:
        raise UsageError(f"{vocabulary},{merges}: not GPT-2's pair of files ({error})", "download them again") from None
