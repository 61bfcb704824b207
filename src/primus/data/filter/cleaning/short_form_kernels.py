"""Kernels that look up runs of characters for which a table lists the words, such as English short forms."""

from __future__ import annotations

import numpy as np

from primus.data.filter.cleaning.compiler import compile_kernel
from primus.data.filter.cleaning.word_hashes import hash_word

LONGEST = 16
"""Maximum length of a run that is looked up."""


@compile_kernel
def compute_sieve_slot(first, last, length, sieve):
    """Index in the sieve for a run with this first and last code and this length."""
    # Any function of the three numbers is valid. This one needs no hash of the run, and spreads the short forms over
    # the sieve.
    return (np.int64(first) * 31 + np.int64(last) * 7 + length) & (len(sieve) - 1)


@compile_kernel
def is_in_sieve(codes, first, last, sieve):
    """Whether a run of characters may be in the table; `sieve` is bool[a power of two], small enough for a cache."""
    if last - first > LONGEST or last <= first:
        return False
    return sieve[compute_sieve_slot(codes[first], codes[last - 1], last - first, sieve)]


@compile_kernel
def find_in_table(value, table):
    """Lengths of the words of the run with this hash, one byte each; 0 if the table does not have it.

    `table` is a hash table with open addressing: uint64[a power of two, 2] of hashes and lengths.
    """
    mask = np.uint64(len(table) - 1)
    # Linear probing; the hash 0 marks a free row. At most an eighth of the rows is in use (`words._build_tables`), so
    # that a search ends after few steps.
    slot = value & mask
    while table[slot, 0] != np.uint64(0):
        if table[slot, 0] == value:
            return table[slot, 1]
        slot = (slot + np.uint64(1)) & mask
    return np.uint64(0)


@compile_kernel
def find_short_form(codes, first, last, sieve, table):
    """Lengths of the words that the table lists for a run of characters; see `find_in_table`."""
    if not is_in_sieve(codes, first, last, sieve):
        return np.uint64(0)
    return find_in_table(hash_word(codes, first, last), table)
