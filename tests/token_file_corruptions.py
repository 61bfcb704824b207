"""Ways in which a pair of token files of type uint16 breaks: what disks, copies, crashes and programs do to them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

HEADER_BYTES = 34
CODE_BYTE, SEQUENCES_BYTE, BORDERS_BYTE = 17, 18, 26

Corrupt = Callable[[Path, int], None]
"""Breaks the files of a prefix, whose documents all end with the given token."""


def _bin(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def _idx(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def _patch(path: Path, byte: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[byte : byte + len(value)] = value
    path.write_bytes(content)


def _tokens(change: Callable[[np.ndarray, int], object]) -> Corrupt:
    def corrupt(prefix: Path, eod: int) -> None:
        tokens = np.fromfile(_bin(prefix), "<u2")
        changed = change(tokens, eod)
        (tokens if changed is None else np.asarray(changed)).astype("<u2").tofile(_bin(prefix))

    return corrupt


def _resized(suffix: str, change: Callable[[bytes], bytes]) -> Corrupt:
    def corrupt(prefix: Path, eod: int) -> None:
        path = prefix.with_name(f"{prefix.name}.{suffix}")
        path.write_bytes(change(path.read_bytes()))

    return corrupt


def _index(byte: Callable[[int], int], form: str, value: Callable[[int], int]) -> Corrupt:
    """Replace one entry of the index; `byte` is given the number of sequences, `value` what was there."""

    def corrupt(prefix: Path, eod: int) -> None:
        content = _idx(prefix).read_bytes()
        place = byte(struct.unpack_from("<Q", content, SEQUENCES_BYTE)[0])
        _patch(_idx(prefix), place, struct.pack(form, value(struct.unpack_from(form, content, place)[0])))

    return corrupt


def _zero_hole(tokens: np.ndarray, eod: int) -> None:
    tokens[5000:9096] = 0


def _flip(tokens: np.ndarray, eod: int) -> None:
    place = 7000 + int(np.flatnonzero((tokens[7000:] != eod) & (tokens[7000:] ^ 1 != eod))[0])
    tokens[place] ^= 1


def _beyond(tokens: np.ndarray, eod: int) -> None:
    tokens[1234] = 65_000


def _no_eod(tokens: np.ndarray, eod: int) -> None:
    tokens[np.flatnonzero(tokens == eod)[20]] = (eod + 1) % 256


def _lengths_of_another_run(prefix: Path, eod: int) -> None:
    content = _idx(prefix).read_bytes()
    count = struct.unpack_from("<Q", content, SEQUENCES_BYTE)[0]
    lengths = np.frombuffer(content, "<i4", count, HEADER_BYTES)
    _patch(_idx(prefix), HEADER_BYTES, lengths[::-1].tobytes())


CORRUPTIONS: dict[str, Corrupt] = {
    "bin truncated": _resized("bin", lambda content: content[: len(content) // 2 // 2 * 2]),
    "bin of odd bytes": _resized("bin", lambda content: content[:-1]),
    "bin empty": _resized("bin", lambda content: b""),
    "bin with trailing garbage": _resized("bin", lambda content: content + b"\x01\x00" * 7),
    "zero hole in bin": _tokens(_zero_hole),
    "bit flip": _tokens(_flip),
    "byte-swapped": _tokens(lambda tokens, eod: tokens.byteswap()),
    "token beyond the vocabulary": _tokens(_beyond),
    "end of document missing": _tokens(_no_eod),
    "one length changed": _index(lambda count: HEADER_BYTES + 4 * 17, "<i", lambda length: length + 3),
    "one length 0": _index(lambda count: HEADER_BYTES + 4 * 17, "<i", lambda length: 0),
    "one length negative": _index(lambda count: HEADER_BYTES + 4 * 17, "<i", lambda length: -length),
    "lengths of another run": _lengths_of_another_run,
    "type code 8 becomes 3": _index(lambda count: CODE_BYTE, "<B", lambda code: 3),
    "type code 8 becomes 4": _index(lambda count: CODE_BYTE, "<B", lambda code: 4),
    "documents not in order": _index(lambda count: HEADER_BYTES + 12 * count + 8 * 9, "<q", lambda border: border - 5),
    "pointer out of range": _index(lambda count: HEADER_BYTES + 4 * count + 8 * 9, "<q", lambda pointer: 1 << 40),
    "pointer negative": _index(lambda count: HEADER_BYTES + 4 * count + 8 * 9, "<q", lambda pointer: -2),
    "idx truncated": _resized("idx", lambda content: content[:-20]),
    "wrong number of sequences": _index(lambda count: SEQUENCES_BYTE, "<Q", lambda number: number + 1),
    "wrong number of documents": _index(lambda count: BORDERS_BYTE, "<Q", lambda number: number - 1),
    "another version": _index(lambda count: 9, "<Q", lambda version: 2),
    "another magic": _resized("idx", lambda content: b"TOKENIDX" + content[8:]),
}
"""The 23 by name."""
