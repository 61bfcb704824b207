"""Loops that look up runs of characters which a table divides, such as English short forms."""

from __future__ import annotations

import numpy as np

from primus.data.filter.cleaning.compiler import compile_kernel
from primus.data.filter.cleaning.word_hashes import hash_word

LONGEST = 16
"""Characters of the longest run that is looked up."""


@compile_kernel
def compute_sieve_slot(first, last, length, sieve):
    """Place in a sieve that tells whether a run with these ends and this length may be in the table."""
    return (np.int64(first) * 31 + np.int64(last) * 7 + length) & (len(sieve) - 1)


@compile_kernel
def is_in_sieve(codes, first, last, sieve):
    """Whether a run of characters may be in the table; `sieve` is bool[a power of two], small enough for a cache."""
    if last - first > LONGEST or last <= first:
        return False
    return sieve[compute_sieve_slot(codes[first], codes[last - 1], last - first, sieve)]


@compile_kernel
def find_in_table(value, table):
    """How a table divides the run of characters with a hash: lengths of the words, a byte each; 0 if it is not there.

    `table` is a hash table with open addressing: uint64[a power of two, 2] of hashes and lengths.
    """
    mask = np.uint64(len(table) - 1)
    slot = value & mask
    while table[slot, 0] != np.uint64(0):
        if table[slot, 0] == value:
            return table[slot, 1]
        slot = (slot + np.uint64(1)) & mask
    return np.uint64(0)


@compile_kernel
def find_short_form(codes, first, last, sieve, table):
    """How the table divides a run of characters; see `look_up`."""
    if not is_in_sieve(codes, first, last, sieve):
        return np.uint64(0)
    return find_in_table(hash_word(codes, first, last), table)
