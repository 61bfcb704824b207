"""The hash of a word: FNV-1a over its code points, then mixed; the same on every machine and in every process."""

from __future__ import annotations

import numpy as np

from primus.data.filter.cleaning.compiler import compile_kernel

# Offset basis and prime of the 64-bit FNV-1a hash.
SEED = np.uint64(0xCBF29CE484222325)
FACTOR = np.uint64(0x100000001B3)
MIX = np.uint64(0xBF58476D1CE4E5B9)
HALF = np.uint64(32)


@compile_kernel
def add_code(value, code):
    """The hash of the codes so far, which starts at `SEED`, extended by one code."""
    return (value ^ np.uint64(code)) * FACTOR


@compile_kernel
def mix_hash(value):
    """The hash of a word from the hash of its codes."""
    # The low bits of an FNV-1a hash depend only on the low bits of the codes. Both shifts fold the high half into the
    # low one, from which the hash tables take their rows.
    value = (value ^ (value >> HALF)) * MIX
    return value ^ (value >> HALF)


@compile_kernel
def hash_word(codes, first, last):
    """64-bit hash of the codes from `first` to `last`."""
    value = SEED
    for i in range(first, last):
        value = add_code(value, codes[i])
    return mix_hash(value)
