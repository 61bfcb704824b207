"""Fast path for encoding: gigatoken for tokenizers that it supports, and the reference tokenizer for all other texts.

Three checks keep the ids equal to those of the reference tokenizer:
    on loading        the engine is used only if it gives the same ids for `PROBES`
    for each text     texts that the two libraries are known to treat differently are encoded by the reference
    for each sample   `primus.data.tokenizers.canary` compares a sample of the documents in each run
If gigatoken fails at run time, the reference encodes the batch and the failure is reported at the end.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primus.data.tokenizers.content import is_json
from primus.data.tokenizers.tokenizer import Batch, TokenizerEngine
from primus.data.tokenizers.tokenizer_json import TokenizerJson

GROWTH_BYTES = 96 << 20
"""Growth of the process after which the cache of words is dropped. English text needs about half of it, and it is below
the limit at which `primus.data.shards.workers` replaces the process."""
PROBES = (
    *("a", "a b", " a  b ", "a\n\n \tb \n", "\r\n\r\n", "it's IT'S we'll'd", "x1234567890", "..!?\n\n-- /"),
    *("caf\u00e9 nai\u0308ve", "\u00a0\u2003\u3000x", "\uff11\uff12\uff13 \u2167\u00bd", "\u65e5\u672c\u3002\ud55c"),
    *("\U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea", "\x00\x1f\x7f\x85\u2028", "fooBar HTTPServer \u01c5ungla"),
    *("\u0663\u0664 \u05e2\u05d1 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22", "def f(x):\n    return x\n"),
    "\u2581 <0x0A>",
)
"""Texts that a fast engine must encode like the reference before it is used; they cover classes of characters."""

NEWER = (
    *((0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0xA7CE, 0xA7CF)),
    *((0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4), (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x10EFA, 0x10EFB)),
    *((0x11B60, 0x11B67), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9), (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3)),
    *((0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E), (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE)),
    *((0x1E6E0, 0x1E6F5), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479)),
)
"""Ranges (first, last) of letters, digits and marks that are new in Unicode 17 (DerivedAge.txt). gigatoken 0.10 knows
them and tokenizers 0.23 does not, as encoding every character with both libraries shows."""

_NEWER = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in NEWER) + "]")
_NEWER_PAIRS = np.zeros(1 << 16, np.bool_)
"""Whether two bytes of UTF-8 may begin a character of `NEWER`; an index by 16 bits needs no search."""
for _first, _last in NEWER:
    _NEWER_PAIRS[
        int.from_bytes(chr(_first).encode()[:2], "big") : int.from_bytes(chr(_last).encode()[:2], "big") + 1
    ] = 1
_NEWER_BYTES = [bytes([lead]) for lead in np.flatnonzero(_NEWER_PAIRS.reshape(256, 256).any(1))]

_NO_TOKENS: NDArray[np.uint32] = np.empty(0, np.uint32)


class GigatokenEngine:
    """Encodes with gigatoken, and with the reference tokenizer where gigatoken may differ or fails.

    It can be pickled: the receiving process creates its own backend from the content on first use.
    """

    def __init__(self, exact: TokenizerEngine, content: bytes, strings: Sequence[str], composes: bool) -> None:
        """Create an engine that gives the ids of `exact`.

        Args:
            exact: The reference engine; it encodes all texts that contain one of `strings`.
            content: A tokenizer.json or a SentencePiece model for gigatoken.
            strings: Strings that only one of the two libraries treats as a single token.
            composes: Whether the tokenizer normalizes texts to NFC before it encodes.
        """
        self.exact = exact
        self.content = content
        self.strings = tuple(strings)
        self.composes = composes
        self.resident = 0
        self.failure = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return GigatokenEngine, (self.exact, self.content, self.strings, self.composes)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        """Token ids of each text."""
        try:
            batch = self._encode_all(texts)
        except BaseException as error:
            # A panic in Rust code is not an Exception; KeyboardInterrupt and SystemExit must pass.
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            tokens = self.exact.encode_batch(texts, add_special_tokens)  # raises its own error if a text is invalid
            # Keep the first failure only: later ones are often its consequences.
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            return tokens
        return _add_template(batch, *self._template) if add_special_tokens else batch

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.exact.decode(ids)

    def drop_cache(self) -> None:
        """Drop the cache of words, which grows with each new word. `encode_batch` calls it when memory has grown."""
        # The library cannot clear its cache: a new backend replaces the old one.
        self.__dict__.pop("_native_backend", None)
        self._load_backend()

    @cached_property
    def _native_backend(self) -> Any:
        import gigatoken

        make = gigatoken.Tokenizer.from_json if is_json(self.content) else gigatoken.Tokenizer.from_sentencepiece
        return make(self.content)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.strings, key=len, reverse=True))))

    @cached_property
    def _beginnings(self) -> list[str]:
        """First two characters of the strings: a search for these few is much faster than one for all the strings."""
        return sorted({string[:2] for string in self.strings})

    @cached_property
    def _template(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Ids that the tokenizer's template adds before and after a text."""
        # Found by example, since each kind of tokenizer describes its template differently.
        plain, whole = (self.exact.encode_batch(["a"], add)[0].tolist() for add in (False, True))
        starts = range(len(whole) - len(plain) + 1)
        start = next(start for start in starts if whole[start : start + len(plain)] == plain)
        return np.array(whole[:start], np.uint32), np.array(whole[start + len(plain) :], np.uint32)

    def _load_backend(self) -> None:
        self._encode_texts(PROBES)  # gigatoken builds its tables with the first text: they do not count as growth
        self.resident = _read_resident_bytes()

    def _encode_all(self, texts: Sequence[str]) -> Batch:
        if "_native_backend" not in self.__dict__ or _read_resident_bytes() - self.resident > GROWTH_BYTES:
            self.drop_cache()
        apart = [number for number, text in enumerate(texts) if self._is_apart(text)]
        return self._encode_without(texts, apart) if apart else self._encode_texts(texts)

    def _is_apart(self, text: str) -> bool:
        """Whether the reference engine must encode the text."""
        if any(beginning in text for beginning in self._beginnings) and self._pattern.search(text):
            return True
        if text.isascii():  # has no new character and is in NFC
            return False
        return _has_newer(text) or (self.composes and not unicodedata.is_normalized("NFC", text))

    def _encode_texts(self, texts: Sequence[str]) -> Batch:
        rows = list(
            map(self._native_backend.encode, texts)
        )  # as fast as its encode_batch, which imports awkward (0.2 s, 60 MB)
        return np.concatenate([_NO_TOKENS, *rows]), np.fromiter(map(len, rows), np.int64, len(rows))

    def _encode_without(self, texts: Sequence[str], apart: list[int]) -> Batch:
        """Encode the texts at the indices `apart` with the reference engine, and the others with gigatoken."""
        others = sorted(set(range(len(texts))).difference(apart))
        rows = [_NO_TOKENS] * len(texts)
        fast = self._encode_texts([texts[number] for number in others])
        exact = self.exact.encode_batch([texts[number] for number in apart], False)
        for numbers, (tokens, lengths) in ((others, fast), (apart, exact)):
            for number, row in zip(numbers, np.split(tokens, np.cumsum(lengths)[:-1]), strict=False):
                rows[number] = row
        return np.concatenate(rows), np.fromiter(map(len, rows), np.int64, len(rows))


def build_for_json(
    exact: TokenizerEngine, outline: TokenizerJson, parse_special_tokens: bool
) -> GigatokenEngine | None:
    """Build a fast engine for a tokenizer.json; None if the fast path does not support it.

    gigatoken gets the file without its added tokens. Special tokens in a text are then plain text, as in the reference
    without `parse_special_tokens`. The reference encodes texts that contain other added tokens.

    Args:
        exact: The reference engine.
        outline: The file.
        parse_special_tokens: Whether special tokens in a text become their ids.
    """
    if not is_known(outline):
        return None
    strings = [token.content for token in outline.added_tokens if parse_special_tokens or not token.special]
    composes = outline.fields.get("normalizer") is not None
    return _check_agreement(GigatokenEngine(exact, outline.encode(added_tokens=[]), strings, composes))


def is_installed() -> bool:
    """Whether gigatoken is installed."""
    return importlib.util.find_spec("gigatoken") is not None


def is_known(outline: TokenizerJson) -> bool:
    """Whether gigatoken is installed and supports a tokenizer.json: a byte-level BPE that splits by patterns."""
    model = outline.model
    # Optional features of a BPE model; the fast path is used only if none of them is set.
    odd = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
    return (
        is_installed()
        and model.get("type", "BPE") == "BPE"
        and not any(model.get(key) for key in odd)
        and bool(outline.list_patterns())
        and outline.has_plain_normalizer()
    )


def build_for_sentencepiece(exact: TokenizerEngine, content: bytes, control: Sequence[str]) -> GigatokenEngine | None:
    """Build a fast engine for a SentencePiece model; None if the fast path does not support it.

    gigatoken recognizes `control` pieces in a text and the reference does not, so the reference encodes such texts.
    """
    return _check_agreement(GigatokenEngine(exact, content, control, False))


def _check_agreement(fast: GigatokenEngine) -> GigatokenEngine | None:
    """Return the engine if gigatoken loads it and gives the ids of the reference for `PROBES`; None otherwise."""
    try:
        fast.drop_cache()
        (tokens, lengths), (expected, expected_lengths) = (
            fast._encode_texts(PROBES),
            fast.exact.encode_batch(PROBES, False),
        )
    except Exception:  # noqa: BLE001 - ImportError; RuntimeError (unsupported scheme); ValueError (unsupported model)
        return None
    except BaseException as error:
        if not _is_panic(error):
            raise
        return None
    return fast if np.array_equal(tokens, expected) and np.array_equal(lengths, expected_lengths) else None


def _has_newer(text: str) -> bool:
    """Whether the text has a character of `NEWER`. Three searches, each slower and more exact than the one before."""
    content = text.encode()
    if not any(lead in content for lead in _NEWER_BYTES):
        return False
    each = np.frombuffer(content, np.uint8)
    return bool(_NEWER_PAIRS[each[:-1].astype(np.uint16) << 8 | each[1:]].any()) and bool(_NEWER.search(text))


def _is_panic(error: BaseException) -> bool:
    """Whether an error is a Rust panic, which pyo3 derives from BaseException."""
    return type(error).__name__ == "PanicException"


def _add_template(batch: Batch, before: NDArray[np.uint32], after: NDArray[np.uint32]) -> Batch:
    """Insert ids before and after each text of a batch."""
    tokens, lengths = batch
    added = len(before) + len(after)
    if not added:
        return batch
    wrapped = lengths + added
    ends = np.cumsum(wrapped)
    starts = ends - wrapped
    # All rows at once: each index array holds the places of one part of every text in the result.
    result = np.empty(int(wrapped.sum()), np.uint32)
    result[starts[:, None] + np.arange(len(before))] = before
    result[ends[:, None] - np.arange(len(after), 0, -1)] = after
    inner = np.arange(len(tokens)) + np.repeat(np.arange(len(lengths)) * added + len(before), lengths)
    result[inner] = tokens
    return result, wrapped


def _read_resident_bytes() -> int:
    """Resident memory of this process; 0 on systems without /proc."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    import resource

    return int(pages) * resource.getpagesize()
