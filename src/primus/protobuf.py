"""Read messages in the wire format of protobuf without its package (protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, LENGTH_DELIMITED = 0, 2
FIXED_BYTES = {1: 8, 5: 4}
"""Sizes of the fixed wire types."""


def read_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: an int for a varint, else the bytes.

    Raises:
        ValueError, IndexError: It is not a message, or is cut off.
    """
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        wire_type = key & 7
        if wire_type == VARINT:
            value, place = _read_varint(message, place)
            yield key >> 3, value
            continue
        size = FIXED_BYTES.get(wire_type)
        if size is None:
            if wire_type != LENGTH_DELIMITED:
                raise ValueError(f"wire type {wire_type}")
            size, place = _read_varint(message, place)
        if place + size > len(message):
            raise ValueError("a field is cut off")
        yield key >> 3, message[place : place + size]
        place += size


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    """An integer of 7 bits a byte, least significant first, and where it ends."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
