"""Loops that find lines. Codes are Unicode code points; positions count them.

Positions that are unsigned numbers cannot count from the end, so that the compiler looks at several codes at once.
"""

from __future__ import annotations

import numpy as np

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.compiler import compile_kernel

SPACE = characters.SPACE
BREAK = characters.BREAK

NEWLINE, RETURN = ord("\n"), ord("\r")
NEWLINE_CODE = np.uint32(NEWLINE)
STRIDE = 8
"""Characters that are looked at together."""
CONTROLS, NUM_CONTROLS = np.uint32(0x0A), np.uint32(0x15)
"""Newline to U+001E, among which are all that end a line in ASCII."""
NEXT_LINE, SEPARATOR, ONE_MORE = np.uint32(0x85), np.uint32(0x2029), np.uint32(1)
"""What else ends a line: U+0085, and U+2028 or, with the lowest bit set, U+2029."""


@compile_kernel
def find_newline(codes, first, last):
    """Position of the first newline, `last` if there is none."""
    while first + STRIDE <= last:
        begin, found = np.uint64(first), False
        for i in range(STRIDE):
            found |= codes[begin + np.uint64(i)] == NEWLINE_CODE
        if found:
            break
        first += STRIDE
    while first < last and codes[first] != NEWLINE_CODE:
        first += 1
    return first


@compile_kernel
def count_newlines(codes, first, last):
    """Number of newlines."""
    count = np.uint32(0)
    for code in codes[first:last]:
        count += np.uint32(code == NEWLINE_CODE)
    return np.int64(count)


@compile_kernel
def skip_newlines(codes, first, last):
    """Position behind all newlines that there are at one."""
    while first < last and codes[first] == NEWLINE_CODE:
        first += 1
    return first


@compile_kernel
def find_line_end(codes, bits, first, last):
    """Position of the first character that ends a line for ``str.splitlines``, `last` if there is none."""
    while first < last:
        if first + STRIDE <= last and not _may_break(codes, np.uint64(first)):
            first += STRIDE
            continue
        stop = min(first + STRIDE, last)
        while first < stop:
            if bits[codes[first]] & BREAK:
                return first
            first += 1
    return first


@compile_kernel
def _may_break(codes, first):
    """Whether one of the next characters may end a line."""
    found = False
    for i in range(STRIDE):
        code = codes[first + np.uint64(i)]
        control = np.uint32(code - CONTROLS) < NUM_CONTROLS
        found |= control | (code == NEXT_LINE) | (np.uint32(code | ONE_MORE) == SEPARATOR)
    return found


@compile_kernel
def skip_break(codes, end, last):
    """Position behind the end of a line, which may be two characters."""
    if end + 1 < last and codes[end] == RETURN and codes[end + 1] == NEWLINE:
        return end + 2
    return end + 1


@compile_kernel
def strip_spaces(codes, bits, first, last):
    """First and last position without the spaces at both ends."""
    while first < last and bits[codes[first]] & SPACE:
        first += 1
    while first < last and bits[codes[last - 1]] & SPACE:
        last -= 1
    return first, last
