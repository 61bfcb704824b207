"""Loops that find what a document says more than once: lines, paragraphs, and runs of n words.

Hashes stand for texts: two of 64 bits that are equal by chance are one document in 10^9 or fewer.
"""

from __future__ import annotations

import numpy as np

from primus.data.cleaning.compiled import entry, kernel
from primus.data.cleaning.quality_kernels import NEWLINE, strip
from primus.data.cleaning.word_kernels import MIX, word_hash

BASE = np.uint64(0x9E3779B97F4A7C15)
"""Of the polynomial in the hashes of words that is the hash of a run of them."""
TOP = np.uint64(29)
ZERO = np.uint64(0)

DUPLICATES, DUPLICATE_CHARACTERS, PIECES = 0, 1, 2
SHORTEST_REPEATED = 5
"""Where no run of this many words is repeated, none of more words is."""


@kernel
def _slot(value, keys, stamps, generation, mask):
    """Where a hash is in the table, or where it belongs: what has another stamp is from before and free."""
    slot = np.int64(((value ^ (value >> TOP)) * MIX) >> np.uint64(20)) & mask
    while stamps[slot] == generation and keys[slot] != value:
        slot = (slot + 1) & mask
    return slot


@kernel
def _mask(num_entries, stamps):
    size = 16
    while size < 2 * num_entries:
        size *= 2
    return min(size, len(stamps)) - 1


@kernel
def _next_cut(codes, position, last, newlines):
    """First and last position of the next run of at least so many newlines."""
    while position < last:
        if codes[position] == NEWLINE:
            end = position + 1
            while end < last and codes[end] == NEWLINE:
                end += 1
            if end - position >= newlines:
                return position, end
            position = end
        else:
            position += 1
    return last, last


@kernel
def _note(codes, first, last, keys, stamps, generation, mask, document, counts):
    value = word_hash(codes, first, last)
    slot = _slot(value, keys, stamps, generation, mask)
    if stamps[slot] == generation:
        counts[document, DUPLICATES] += 1
        counts[document, DUPLICATE_CHARACTERS] += last - first
    else:
        stamps[slot] = generation
        keys[slot] = value


@entry
def pieces(codes, offsets, alive, bits, newlines, stripped, keys, stamps, generation, counts):
    """Repeated pieces between runs of at least so many newlines.

    Args:
        codes, offsets, alive, bits: The documents.
        newlines: 1 for lines, 2 for paragraphs.
        stripped: Whether spaces at both ends of a document do not belong to it.
        keys, stamps: A hash table of any content; its size is a power of two and twice that of the longest document.
        generation: A number that no stamp has; one more for each document.
        counts: Receives the number of repeated pieces, of their characters, and of pieces; int64[D, 3].
    """
    for document in range(len(offsets) - 1):
        if not alive[document]:
            continue
        generation += 1
        first, last = offsets[document], offsets[document + 1]
        if stripped:
            first, last = strip(codes, bits, first, last)
        count = 1
        cut, after = _next_cut(codes, first, last, newlines)
        while cut < after:
            count += 1
            cut, after = _next_cut(codes, after, last, newlines)
        mask = _mask(count, stamps)
        counts[document, PIECES] = count
        for _ in range(count):
            cut, after = _next_cut(codes, first, last, newlines)
            _note(codes, first, cut, keys, stamps, generation, mask, document, counts)
            first = after
    return generation


@entry
def lines(codes, offsets, alive, bits, keys, stamps, generation, counts):
    """Repeated lines that are not blank, with the arguments of `pieces`."""
    for document in range(len(offsets) - 1):
        if not alive[document]:
            continue
        generation += 1
        last = offsets[document + 1]
        count = 1
        for i in range(offsets[document], last):
            if codes[i] == NEWLINE:
                count += 1
        mask = _mask(count, stamps)
        first = offsets[document]
        for _ in range(count):
            end = first
            while end < last and codes[end] != NEWLINE:
                end += 1
            begins, ends = strip(codes, bits, first, end)
            if begins < ends:
                counts[document, PIECES] += 1
                _note(codes, first, end, keys, stamps, generation, mask, document, counts)
            first = end + 1
    return generation


@kernel
def _power(n):
    value = np.uint64(1)
    for _ in range(n):
        value = value * BASE
    return value


@kernel
def _most_frequent(spans, first, count, n, sums, keys, stamps, tallies, seen, generation):
    """Characters of the most frequent run of n words, with a space between two, times how often it is there."""
    mask = _mask(count, stamps)
    power = _power(n)
    best = best_at = 0
    for i in range(count - n + 1):
        value = sums[i + n] - sums[i] * power
        slot = _slot(value, keys, stamps, generation, mask)
        if stamps[slot] != generation:
            stamps[slot] = generation
            keys[slot] = value
            tallies[slot] = 0
            seen[slot] = i
        tallies[slot] += 1
        if tallies[slot] > best or (tallies[slot] == best and seen[slot] < best_at):
            best = tallies[slot]
            best_at = seen[slot]
    if best == 0:
        return 0
    return best * (_characters(spans, first + best_at, n) + n - 1)


@kernel
def _characters(spans, word, n):
    """Characters of n words."""
    total = 0
    for i in range(word, word + n):
        total += spans[i, 1] - spans[i, 0]
    return total


@kernel
def _repeated(spans, first, count, n, sums, keys, stamps, generation):
    """Characters of runs of n words that were there before; runs that are counted do not overlap."""
    mask = _mask(count, stamps)
    power = _power(n)
    total = i = 0
    while i < count - n + 1:
        value = sums[i + n] - sums[i] * power
        slot = _slot(value, keys, stamps, generation, mask)
        if stamps[slot] == generation:
            total += _characters(spans, first + i, n)
            i += n
        else:
            stamps[slot] = generation
            keys[slot] = value
            i += 1
    return total


@entry
def ngrams(firsts, spans, hashes, alive, most, repeated, sums, keys, stamps, tallies, seen, generation, counts):
    """Characters in repeated runs of words.

    Args:
        firsts, spans, hashes: Words of the documents.
        alive: Which documents to look at.
        most: Lengths n of which the most frequent run counts, ascending.
        repeated: Lengths n of which all repeated runs count, ascending.
        sums: Room for one more than the words of any document.
        keys, stamps, tallies, seen: A hash table; see `pieces`.
        generation: A number that no stamp has.
        counts: Receives the characters for each of `most`, then for each of `repeated`; int64[D, ...].
    """
    for document in range(len(firsts) - 1):
        if not alive[document]:
            continue
        first, count = firsts[document], firsts[document + 1] - firsts[document]
        sums[0] = ZERO
        for i in range(count):
            sums[i + 1] = sums[i] * BASE + hashes[first + i]
        for column in range(len(most)):
            generation += 1
            counts[document, column] = _most_frequent(
                spans, first, count, most[column], sums, keys, stamps, tallies, seen, generation
            )
        for column in range(len(repeated)):
            generation += 1
            total = _repeated(spans, first, count, repeated[column], sums, keys, stamps, generation)
            counts[document, len(most) + column] = total
            if total == 0:
                break
    return generation
