"""The files next to a tokenizer in which transformers finds special tokens, chat templates and the class."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct

from primus.errors import UsageError
from primus.web import hub

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
MODEL_CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

ReadFile = Callable[[str], "bytes | None"]
"""Content of a file next to a tokenizer by its name; None for one that does not exist."""


class SiblingConfig(Struct, frozen=True, kw_only=True):
    """The fields that are read of these files, as they stand there: the files are written by many programs."""

    bos_token: object = None
    eos_token: object = UNSET
    """An explicit null overrides the default of the tokenizer's class."""
    sep_token: object = None
    unk_token: object = None
    pad_token: object = None
    tokenizer_class: object = None
    added_tokens_decoder: object = UNSET
    """Old versions of transformers do not write it."""
    chat_template: object = None
    """A template, or several with a name each."""
    model_type: object = None
    eos_token_id: object = UNSET
    text_config: object = None
    """Settings of the language model of a model with several parts."""


def open_siblings(name: str, *, ask_hub: bool = True) -> ReadFile:
    """Reads the files next to a tokenizer, from its folder or the hub.

    Args:
        name: Path of the tokenizer or of its folder, or its name on the hub.
        ask_hub: Whether files are downloaded that are not in the local cache of the hub.
    """
    path = Path(os.path.expanduser(name))
    if not path.exists():
        return lambda file: hub.read_optional_file(name, file, ask_hub)
    folder = path if path.is_dir() else path.parent
    return lambda file: (folder / file).read_bytes() if (folder / file).is_file() else None


def read_config(read: ReadFile, where: str, file: str) -> SiblingConfig:
    """One of the files; without any field if it does not exist.

    Args:
        read: Reads the files next to the tokenizer.
        where: Folder or name on the hub, for messages.
        file: Name of the file.

    Raises:
        UsageError: The file is damaged.
    """
    content = read(file)
    try:
        return msgspec.json.decode(content or b"{}", type=SiblingConfig)
    except msgspec.ValidationError:  # JSON, and not an object
        return SiblingConfig()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}/{file}: not JSON ({error})", "save or download it again") from None


def get_token(value: object) -> str:
    """A special token, which is a text or an object with its content; empty if the value is neither."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""
