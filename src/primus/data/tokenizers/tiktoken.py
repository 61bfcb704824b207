"""Vocabularies of tiktoken: a file of ranks, and the scheme (split pattern, special tokens) that the file lacks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from primus.data.tokenizers.byte_level import from_ranks
from primus.data.tokenizers.cuts import CL100K, GPT2, O200K, QWEN2, TEKKEN
from primus.data.tokenizers.document_ends import END_OF_TEXT
from primus.errors import PrimusError, UsageError, did_you_mean

PREFIX = "tiktoken:"
_FILL_IN = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
)
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


@dataclass(frozen=True)
class TiktokenScheme:
    """Properties of a tokenizer that a file of ranks does not contain."""

    pattern: str
    """Pattern that splits a text; see `primus.data.tokenizers.cuts.PATTERNS`."""
    num_ranks: int = 0
    """Number of ranks of the published file; the special tokens below apply only to files of this size."""
    special: dict[str, int] = field(default_factory=dict)
    """Id of each special token."""
    before: tuple[str, ...] = ()
    """Special tokens that the template adds before a text."""
    sha256: str = ""
    """Checksum of the published file."""


SCHEMES = {
    "gpt2": TiktokenScheme(
        GPT2, 50256, {END_OF_TEXT: 50256}, sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    ),
    "cl100k": TiktokenScheme(
        CL100K,
        100256,
        {END_OF_TEXT: 100257, **_FILL_IN, "<|endofprompt|>": 100276},
        sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    "o200k": TiktokenScheme(
        O200K,
        199998,
        {END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
        sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
    "llama3": TiktokenScheme(
        CL100K,
        128000,
        {token: 128000 + number for number, token in enumerate(_LLAMA3)},
        ("<|begin_of_text|>",),
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
    ),
    "qwen": TiktokenScheme(QWEN2, 151643, {END_OF_TEXT: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}),
}
"""Schemes by name, from tiktoken_ext/openai_public.py and the tokenizer.json of Llama 3.1 and of Qwen 2."""

ALIASES = {"r50k": "gpt2", "r50k_base": "gpt2", "cl100k_base": "cl100k", "gpt4": "cl100k", "o200k_base": "o200k"}
ENCODINGS = {"gpt2": "r50k_base", "cl100k": "cl100k_base", "o200k": "o200k_base"}
"""Encoding name of a scheme in the tiktoken library."""

MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "v2": TEKKEN,
}
"""Patterns of Megatron's TikTokenizer (megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py)."""
MEGATRON_VOCABULARY = 1 << 17
"""Vocabulary size of Megatron's TikTokenizer, including special tokens."""
MEGATRON_SPECIAL = 1000
MEGATRON_NAMED = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


def read_encoding(name: str) -> bytes:
    """Build the tokenizer.json of ``tiktoken:NAME`` or ``tiktoken:SCHEME:FILE``.

    Raises:
        UsageError: The scheme or the file does not exist.
        PrimusError: The library cannot download the encoding.
    """
    scheme, _, file = name.removeprefix(PREFIX).partition(":")
    if not file:
        return _read_published(scheme)
    path = Path(os.path.expanduser(file))
    if not path.is_file():
        raise UsageError(f"{path}: no such file", "write tiktoken:SCHEME:FILE")
    return convert_ranks(path.read_bytes(), file, scheme)


def is_rank_file(content: bytes) -> bool:
    """Whether a file contains ranks, as tiktoken's lines or as the JSON list of Megatron's TikTokenizer."""
    return bool(_LINE.match(content[:1024])) or (content[:1] == b"[" and b'"token_bytes"' in content[:4096])


def convert_ranks(content: bytes, name: str, scheme: str = "") -> bytes:
    """Convert a file of ranks to a tokenizer.json.

    Args:
        content: Content of the file.
        name: Name of the file, for messages and to recognize its scheme.
        scheme: Name of the scheme; if empty, it is recognized by the checksum or the name of the file.

    Raises:
        UsageError: The file is damaged, or its scheme is unknown.
    """
    if content[:1] == b"[":
        return _convert_megatron(content, name, scheme or "v2")
    chosen = _find_scheme(scheme) if scheme else _recognize_scheme(content, name)
    ranks = _parse_ranks(content, name)
    special = chosen.special if len(ranks) == chosen.num_ranks else {END_OF_TEXT: max(ranks.values()) + 1}
    before = chosen.before if chosen.special is special else ()
    return from_ranks(ranks, chosen.pattern, special, before)


def _read_published(name: str) -> bytes:
    """Build the tokenizer.json of an encoding that the tiktoken library downloads or has in its cache."""
    found = ALIASES.get(name, name)
    if found not in ENCODINGS:
        raise UsageError(f"no tiktoken encoding '{name}'", did_you_mean(name, [*ENCODINGS.values(), *ENCODINGS]))
    try:
        import tiktoken
    except ImportError:
        raise UsageError(f"{PREFIX}{name} needs the package tiktoken", "pip install tiktoken") from None
    try:
        encoding = tiktoken.get_encoding(ENCODINGS[found])
    except (OSError, ValueError) as error:
        raise PrimusError(
            f"{PREFIX}{name}: tiktoken cannot download it ({error})",
            f"give its file as {PREFIX}{found}:FILE, or set TIKTOKEN_CACHE_DIR to a folder that has it",
        ) from None
    chosen = SCHEMES[found]
    return from_ranks(encoding._mergeable_ranks, chosen.pattern, chosen.special)


def _find_scheme(name: str) -> TiktokenScheme:
    found = ALIASES.get(name, name)
    if found not in SCHEMES:
        raise UsageError(f"no tiktoken scheme '{name}'", did_you_mean(name, [*SCHEMES, *ALIASES]))
    return SCHEMES[found]


def _recognize_scheme(content: bytes, name: str) -> TiktokenScheme:
    """Scheme of a published file, recognized by its checksum, or of a file whose name starts with that of a scheme."""
    digest = hashlib.sha256(content).hexdigest()
    for scheme in SCHEMES.values():
        if scheme.sha256 == digest:
            return scheme
    stem = Path(name).name.lower()
    for scheme_name in (*SCHEMES, *ALIASES):
        if stem.startswith(scheme_name):
            return _find_scheme(scheme_name)
    raise UsageError(
        f"{name}: a rank file does not define how text is split, and this file is not a published one",
        f"name its scheme: {PREFIX}SCHEME:{name} with one of {', '.join(SCHEMES)}",
    )


def _parse_ranks(content: bytes, name: str) -> dict[bytes, int]:
    """Parse lines ``BASE64 RANK``, and check that every byte has a rank and no rank occurs twice."""
    try:
        pairs = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise UsageError(f"{name}: not a file of ranks ({error})", "download it again") from None
    _check_ranks(ranks, name)
    return ranks


def _check_ranks(ranks: dict[bytes, int], name: str) -> None:
    if any(bytes([byte]) not in ranks for byte in range(256)) or len(set(ranks.values())) != len(ranks):
        raise UsageError(f"{name}: a byte is missing or a rank occurs twice", "download it again")


def _convert_megatron(content: bytes, name: str, pattern: str) -> bytes:
    """Convert the file of Megatron's TikTokenizer to a tokenizer.json with its default special tokens."""
    if pattern not in MEGATRON_PATTERNS:
        raise UsageError(f"no pattern '{pattern}' of TikTokenizer", did_you_mean(pattern, list(MEGATRON_PATTERNS)))
    try:
        listed = json.loads(content)[: MEGATRON_VOCABULARY - MEGATRON_SPECIAL]
        ranks = {base64.b64decode(token["token_bytes"]): token["rank"] + MEGATRON_SPECIAL for token in listed}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{name}: not a vocabulary of TikTokenizer ({error!r})", "download it again") from None
    _check_ranks(ranks, name)
    fillers = (f"<SPECIAL_{number}>" for number in range(len(MEGATRON_NAMED), MEGATRON_SPECIAL))
    special = {token: number for number, token in enumerate((*MEGATRON_NAMED, *fillers))}
    return from_ranks(ranks, MEGATRON_PATTERNS[pattern], special)
