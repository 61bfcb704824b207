"""Kernels that find lines. `codes` are code points, uint32[N]; positions are indices into it.

The inner loops use unsigned positions. A signed index may be negative and count from the end; the check for that
prevents vectorization.
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
"""Characters that one step of a search compares."""
CONTROLS, NUM_CONTROLS = np.uint32(0x0A), np.uint32(0x15)
"""The range U+000A to U+001E, which contains every ASCII character that ends a line."""
NEXT_LINE, SEPARATOR, ONE_MORE = np.uint32(0x85), np.uint32(0x2029), np.uint32(1)
"""The other line ends: U+0085, U+2028 and U+2029. The last two are equal once the lowest bit is set."""


@compile_kernel
def find_newline(codes, first, last):
    """Position of the first newline, `last` if there is none."""
    while first + STRIDE <= last:
        # A fixed number of comparisons without a branch compiles to vector instructions. A step with a newline is left
        # to the scalar loop below.
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
    # The counter is as wide as a code, so that both fill the same vector lanes.
    count = np.uint32(0)
    for code in codes[first:last]:
        count += np.uint32(code == NEWLINE_CODE)
    return np.int64(count)


@compile_kernel
def skip_newlines(codes, first, last):
    """Position after a run of newlines."""
    while first < last and codes[first] == NEWLINE_CODE:
        first += 1
    return first


@compile_kernel
def find_line_end(codes, bits, first, last):
    """Position of the first character that ends a line for ``str.splitlines``, `last` if there is none."""
    while first < last:
        # `_may_break` also reports control characters that end no line, so that the table decides within the step.
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
        # The subtraction wraps around for smaller codes: one comparison tests both bounds.
        control = np.uint32(code - CONTROLS) < NUM_CONTROLS
        found |= control | (code == NEXT_LINE) | (np.uint32(code | ONE_MORE) == SEPARATOR)
    return found


@compile_kernel
def skip_break(codes, end, last):
    """Position after a line end, which has one or two characters."""
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
