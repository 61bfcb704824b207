"""Kernels that normalize texts for comparison. `codes` are code points, uint32[N]; positions are indices into it."""

from __future__ import annotations

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.compiler import compile_entry, compile_kernel

SPACE = characters.SPACE
BLANK = characters.BLANK
DECIMAL = characters.DECIMAL
NUM_CODES = characters.NUM_CODES

SEPARATORS = (ord("."), ord(","), 0x60C, 0x66B, 0x2396, 0x2397, 0x2398)
"""Separators between the digits of one number."""


@compile_entry
def simplify_codes(codes, offsets, bits, single, several, written, written_offsets):
    """Normalize documents: lower-case letters without marks, numbers as 0, one space for anything else.

    `written` has room for `len(codes)` times the maximum number of codes in a row of `several`.
    """
    count = 0
    for document in range(len(offsets) - 1):
        written_offsets[document] = count
        begin = count
        i, end = offsets[document], offsets[document + 1]
        # A space is pending until the next character is written, so that runs of spaces become one and none remains at
        # either end.
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
                # 48 is the digit 0, and 32 above is the space.
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
            # A value of NUM_CODES or more is a row of `several`: a count, then the codes.
            row = becomes - NUM_CODES
            for part in range(1, several[row, 0] + 1):
                written[count] = several[row, part]
                count += 1
    written_offsets[len(offsets) - 1] = count
    return count


@compile_kernel
def _skip_number(codes, bits, i, end):
    """Position after a number that begins at `i`."""
    while i < end and bits[codes[i]] & DECIMAL:
        i += 1
    # At most one separator, so that 1.000,5 is two numbers.
    if i + 1 < end and codes[i] in SEPARATORS and bits[codes[i + 1]] & DECIMAL:
        i += 1
        while i < end and bits[codes[i]] & DECIMAL:
            i += 1
    return i
