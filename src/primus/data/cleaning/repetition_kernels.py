"""Loops that find what a document says more than once: lines, paragraphs, and runs of n words.

Hashes stand for texts: two of 64 bits that are equal by chance are one document in 10^9 or fewer.
"""

from __future__ import annotations

import numpy as np

from primus.data.cleaning.compiled import entry, kernel
from primus.data.cleaning.quality_kernels import NEWLINE, strip
from primus.data.cleaning.word_kernels import HALF, MIX, SEED

BASE = np.uint64(0x9E3779B97F4A7C15)
"""Of the polynomial in the hashes of words that is the hash of a run of them."""
TOP = np.uint64(29)
CODE_BITS, TWO_CODE_BITS = np.uint64(21), np.uint64(42)
ZERO, ONE = np.uint64(0), np.uint64(1)

KEY, GENERATION, TALLY, FIRST = 0, 1, 2, 3
"""Columns of the hash table: a hash, whose it is, how often and where first it was found."""

DUPLICATES, DUPLICATE_CHARACTERS, PIECES = 0, 1, 2


@kernel
def _slot(value, table, generation, mask):
    """Row of a hash in the table, or where it belongs: rows of another generation are from before and free."""
    slot = np.int64(((value ^ (value >> TOP)) * MIX) >> np.uint64(20)) & mask
    while table[slot, GENERATION] == generation and table[slot, KEY] != value:
        slot = (slot + 1) & mask
    return slot


@kernel
def _mask(num_entries, table):
    size = 16
    while size < 2 * num_entries:
        size *= 2
    return min(size, len(table)) - 1


@kernel
def _text_hash(codes, first, last):
    """64-bit hash of some codes, three at a time: a code has 21 bits."""
    value = SEED
    i = first
    while i + 2 < last:
        three = np.uint64(codes[i]) | np.uint64(codes[i + 1]) << CODE_BITS | np.uint64(codes[i + 2]) << TWO_CODE_BITS
        value = (value ^ three) * BASE
        value ^= value >> HALF
        i += 3
    while i < last:
        value = (value ^ np.uint64(codes[i])) * MIX
        value ^= value >> HALF
        i += 1
    return value


@kernel
def _note(value, length, table, generation, mask, document, counts):
    """Count a piece."""
    counts[document, PIECES] += 1
    slot = _slot(value, table, generation, mask)
    if table[slot, GENERATION] == generation:
        counts[document, DUPLICATES] += 1
        counts[document, DUPLICATE_CHARACTERS] += length
    else:
        table[slot, GENERATION] = generation
        table[slot, KEY] = value


@kernel
def _num_newlines(codes, first, last):
    count = 0
    for i in range(first, last):
        count += codes[i] == NEWLINE
    return count


@entry
def pieces(codes, offsets, alive, bits, newlines, stripped, table, generation, counts):
    """Repeated pieces between runs of at least so many newlines.

    Args:
        codes, offsets, alive, bits: The documents.
        newlines: 1 for lines, 2 for paragraphs.
        stripped: Whether spaces at both ends of a document do not belong to it.
        table: A hash table of any content, uint64[size, 4]; its size is a power of two and at least that of the
            longest document.
        generation: What the last use of the table has returned.
        counts: Receives the number of repeated pieces, of their characters, and of pieces; int64[D, 3].

    Returns:
        The generation of the last document.
    """
    for document in range(len(offsets) - 1):
        if not alive[document]:
            continue
        generation += ONE
        first, last = offsets[document], offsets[document + 1]
        if stripped:
            first, last = strip(codes, bits, first, last)
        mask = _mask(_num_newlines(codes, first, last) + 1, table)
        i = first
        while i < last:
            while i < last and codes[i] != NEWLINE:
                i += 1
            end = i
            while end < last and codes[end] == NEWLINE:
                end += 1
            if end - i >= newlines:
                _note(_text_hash(codes, first, i), i - first, table, generation, mask, document, counts)
                first = end
            i = end
        _note(_text_hash(codes, first, last), last - first, table, generation, mask, document, counts)
    return generation


@entry
def lines(codes, offsets, alive, bits, table, generation, counts):
    """Repeated lines that are not blank, with the arguments of `pieces`."""
    for document in range(len(offsets) - 1):
        if not alive[document]:
            continue
        generation += ONE
        first, last = offsets[document], offsets[document + 1]
        count = _num_newlines(codes, first, last) + 1
        mask = _mask(count, table)
        for _ in range(count):
            end = first
            while end < last and codes[end] != NEWLINE:
                end += 1
            begins, ends = strip(codes, bits, first, end)
            if begins < ends:
                _note(_text_hash(codes, first, end), end - first, table, generation, mask, document, counts)
            first = end + 1
    return generation


@kernel
def _power(n):
    value = np.uint64(1)
    for _ in range(n):
        value = value * BASE
    return value


@kernel
def _tally(count, n, level, runs, sums, slots, table, generation):
    """Count the runs of n words; returns how often the most frequent is there, and the word at which it first begins.

    Only a run all of whose shorter runs are repeated can be: `runs` has for each word how many runs of `level` words
    from there on are.
    """
    mask = _mask(count, table)
    power = _power(n)
    best, best_at = 1, 0
    for i in range(count - n + 1):
        slots[i] = -1
        if level and runs[i] < n - level + 1:
            continue
        value = sums[i + n] - sums[i] * power
        slot = _slot(value, table, generation, mask)
        slots[i] = slot
        if table[slot, GENERATION] != generation:
            table[slot, GENERATION] = generation
            table[slot, KEY] = value
            table[slot, TALLY] = ONE
            table[slot, FIRST] = np.uint64(i)
            continue
        table[slot, TALLY] += ONE
        tally, first = np.int64(table[slot, TALLY]), np.int64(table[slot, FIRST])
        if tally > best or (tally == best and first < best_at):
            best, best_at = tally, first
    return best, best_at


@kernel
def _note_runs(count, n, slots, table, runs):
    """Make `runs` tell of runs of n words."""
    for i in range(count, max(count - n, -1), -1):
        runs[i] = 0
    for i in range(count - n, -1, -1):
        runs[i] = runs[i + 1] + 1 if slots[i] >= 0 and table[slots[i], TALLY] > ONE else 0


@kernel
def _characters(spans, word, n):
    """Characters of n words."""
    total = 0
    for i in range(word, word + n):
        total += spans[i, 1] - spans[i, 0]
    return total


@kernel
def _repeated(spans, first, count, n, level, runs, sums, table, generation):
    """Characters of runs of n words that were there before; runs that are counted do not overlap."""
    mask = _mask(count, table)
    power = _power(n)
    total = i = 0
    while i < count - n + 1:
        if level and runs[i] < n - level + 1:
            i += 1
            continue
        value = sums[i + n] - sums[i] * power
        slot = _slot(value, table, generation, mask)
        if table[slot, GENERATION] == generation:
            total += _characters(spans, first + i, n)
            i += n
        else:
            table[slot, GENERATION] = generation
            table[slot, KEY] = value
            i += 1
    return total


@entry
def ngrams(firsts, spans, hashes, alive, most, repeated, sums, slots, runs, table, generation, counts):
    """Characters in repeated runs of words.

    Args:
        firsts, spans, hashes: Words of the documents.
        alive: Which documents to look at.
        most: Lengths n of which the most frequent run counts, with a space between two words; ascending.
        repeated: Lengths n of which all repeated runs count, without spaces; none is less than one of `most`.
        sums, slots, runs: Room for one more than the words of any document: uint64, int64, int64.
        table, generation: A hash table; see `pieces`.
        counts: Receives the characters for each of `most`, then for each of `repeated`; int64[D, ...].

    Returns:
        The last generation.
    """
    for document in range(len(firsts) - 1):
        if not alive[document]:
            continue
        first, count = firsts[document], firsts[document + 1] - firsts[document]
        sums[0] = ZERO
        for i in range(count):
            sums[i + 1] = sums[i] * BASE + hashes[first + i]
        level = 0
        for column in range(len(most)):
            generation += ONE
            n = most[column]
            if count < n:
                break
            best, best_at = _tally(count, n, level, runs, sums, slots, table, generation)
            counts[document, column] = best * (_characters(spans, first + best_at, n) + n - 1)
            _note_runs(count, n, slots, table, runs)
            level = n
        for column in range(len(repeated)):
            generation += ONE
            total = _repeated(spans, first, count, repeated[column], level, runs, sums, table, generation)
            counts[document, len(most) + column] = total
    return generation
