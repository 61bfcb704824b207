"""Tokenizers of the Hugging Face `tokenizers` library: from a file, a folder or the hub, or trained on text."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from primus.errors import PrimusError, UsageError, did_you_mean

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

END_OF_TEXT = "<|endoftext|>"
END_OF_DOCUMENT = (
    END_OF_TEXT,  # GPT-2, Qwen, Phi, gpt-oss
    "<|end_of_text|>",  # Llama 3
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "</s>",  # Llama 2, Mistral, Mixtral
    "<eos>",  # Gemma
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)
"""Tokens that end a document, in the order in which they are looked for (tokenizer_config.json of these models)."""

SMALLEST_BPE = 257
"""256 bytes and the end of a document."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with what the token files need to know about it."""

    name: str
    """What it was loaded from."""
    content: bytes
    """Its tokenizer.json."""
    backend: Backend
    """The library's object, without truncation and padding."""
    vocab_size: int
    """Largest token id + 1, which is more than the number of tokens where ids have gaps."""
    eod: str | None
    """Token that ends a document."""
    eod_id: int | None
    """Its id."""
    fingerprint: str
    """Identity of what decides the ids; see `fingerprint`."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[NDArray[np.int64]]:
        """Token ids of each text."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        return text


def load(name: str | Path, eod: str | None = None, parse_special_tokens: bool = False) -> Tokenizer:
    """The tokenizer at a path or of a hub name.

    Args:
        name: A tokenizer.json, a folder that has one, or a name on the hub such as ``Qwen/Qwen3-8B``.
        eod: Token that ends a document; one of `END_OF_DOCUMENT` that the vocabulary has when None.
        parse_special_tokens: Whether a special token that a text spells out becomes its id, which lets a text forge the
            end of a document, instead of plain text.

    Raises:
        UsageError: There is no such tokenizer, it is damaged, or it has no token `eod`.
        PrimusError: The hub cannot be reached.
    """
    path = _local_file(Path(name).expanduser())
    if path is None:
        path = _from_hub(str(name))
    return from_content(path.read_bytes(), str(name), eod, parse_special_tokens)


def from_content(content: bytes, name: str, eod: str | None = None, parse_special_tokens: bool = False) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes; see `load`."""
    backend = _parse(content, name)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = not parse_special_tokens
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    token = _end_of_document(vocabulary, eod, name)
    return Tokenizer(
        name=name,
        content=content,
        backend=backend,
        vocab_size=max(vocabulary.values()) + 1,
        eod=token,
        eod_id=None if token is None else vocabulary[token],
        fingerprint=fingerprint(content),
    )


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE as of GPT-2, trained on `texts`; the same texts in the same order give the same tokenizer.

    Args:
        texts: What to train on; all of their distinct words are in memory.
        vocab_size: Most tokens to have, ``<|endoftext|>`` and the 256 bytes among them.

    Raises:
        UsageError: `vocab_size` has no room for the bytes.
    """
    if vocab_size < SMALLEST_BPE:
        raise UsageError(f"a byte-level BPE of {vocab_size} tokens", f"it needs at least {SMALLEST_BPE}")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return from_content(backend.to_str(pretty=True).encode(), f"bpe:{vocab_size}", END_OF_TEXT)


def fingerprint(content: bytes) -> str:
    """Identity of a tokenizer.json: sha256 of what decides the ids of a text.

    Two files that differ only in layout, decoding, padding or templates, as when a library saves one again, are equal.
    """
    described = json.loads(content)
    model = described.get("model", {})
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    parts = {
        "normalizer": described.get("normalizer"),
        "pre_tokenizer": described.get("pre_tokenizer"),
        "added": sorted((token["id"], token["content"]) for token in described.get("added_tokens", [])),
        "type": model.get("type", "BPE"),
        "vocab": model.get("vocab"),
        "merges": merges,
        "ignore_merges": bool(model.get("ignore_merges")),
        "byte_fallback": bool(model.get("byte_fallback")),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _local_file(path: Path) -> Path | None:
    """The tokenizer.json at `path`; None where `path` can only be a name on the hub.

    Raises:
        UsageError: `path` is local, but there is no tokenizer.json.
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
        raise UsageError(f"{path}: no such tokenizer", "give a tokenizer.json, a folder that has one, or a hub name")
    return None


def _from_hub(name: str) -> Path:
    """The tokenizer.json of a model on the hub, from the local cache where it is there."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise UsageError(
            f"{name}: no such file, and names on the hub need the package huggingface_hub",
            "pip install huggingface_hub, or give the path of a tokenizer.json",
        ) from None
    try:
        return Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
    except errors.HFValidationError:
        raise UsageError(f"{name}: no such file, and no name on the hub", "give a path or OWNER/NAME") from None
    except errors.GatedRepoError:
        raise PrimusError(
            f"{name}: the hub gives this model only to those who accepted its terms",
            f"accept them at https://huggingface.co/{name} and set HF_TOKEN",
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{name}: neither a local file nor a model on the hub that you may see",
            "check the name; a private model needs HF_TOKEN",
        ) from None
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(name, error) from None
        raise UsageError(f"{name}: this model has no tokenizer.json", "save one with transformers") from None
    except _network_errors() as error:
        raise _unreachable(name, error) from None


def _unreachable(name: str, error: Exception) -> PrimusError:
    reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
    return PrimusError(
        f"{name}: no such file, and the hub cannot be reached ({reason[0]})",
        "give the path of a tokenizer.json, or download it where there is a network and set HF_HOME to that cache",
    )


def _network_errors() -> tuple[type[Exception], ...]:
    """Errors of the network, and of the HTTP client that the installed huggingface_hub uses."""
    found: list[type[Exception]] = [OSError]
    for module, error in (("httpx", "HTTPError"), ("httpx2", "HTTPError"), ("requests", "RequestException")):
        with suppress(ImportError):
            found.append(getattr(importlib.import_module(module), error))
    return tuple(found)


def _parse(content: bytes, name: str) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(content.decode())
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every kind of damage
        raise UsageError(f"{name}: not a tokenizer.json ({error})", "save or download it again") from None


def _end_of_document(vocabulary: dict[str, int], eod: str | None, name: str) -> str | None:
    if eod is None:
        return next((token for token in END_OF_DOCUMENT if token in vocabulary), None)
    if eod not in vocabulary:
        special = [token for token in vocabulary if token.startswith(("<", "["))]
        raise UsageError(f"{name}: no token '{eod}' in this tokenizer", did_you_mean(eod, special[:200]))
    return eod
