"""Loops that make texts comparable. Codes are Unicode code points; positions count them."""

from __future__ import annotations

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.compiler import compile_entry, compile_kernel

SPACE = characters.SPACE
BLANK = characters.BLANK
DECIMAL = characters.DECIMAL
NUM_CODES = characters.NUM_CODES

SEPARATORS = (ord("."), ord(","), 0x60C, 0x66B, 0x2396, 0x2397, 0x2398)
"""What may stand between the digits of one number."""


@compile_entry
def simplify_codes(codes, offsets, bits, single, several, written, written_offsets):
    """Documents for comparing: small letters without marks, numbers as 0, one space for anything else.

    `written` has room for `len(codes)` times the longest row of `several`.
    """
    count = 0
    for document in range(len(offsets) - 1):
        written_offsets[document] = count
        begin = count
        i, end = offsets[document], offsets[document + 1]
        space = False
        while i < end:
            code = codes[i]
            kind = bits[code]
            if kind & (SPACE | BLANK):
                space = True
                i += 1
                continue
            if space and count > begin:
                written[count] = 32
                count += 1
            space = False
            if kind & DECIMAL:
                i = _skip_number(codes, bits, i, end)
                written[count] = 48
                count += 1
                continue
            i += 1
            becomes = single[code]
            if becomes < NUM_CODES:
                written[count] = becomes
                count += 1
                continue
            row = becomes - NUM_CODES
            for part in range(1, several[row, 0] + 1):
                written[count] = several[row, part]
                count += 1
    written_offsets[len(offsets) - 1] = count
    return count


@compile_kernel
def _skip_number(codes, bits, i, end):
    """Position behind a number that begins at `i`."""
    while i < end and bits[codes[i]] & DECIMAL:
        i += 1
    if i + 1 < end and codes[i] in SEPARATORS and bits[codes[i + 1]] & DECIMAL:
        i += 1
        while i < end and bits[codes[i]] & DECIMAL:
            i += 1
    return i
