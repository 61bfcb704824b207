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
NUM_COUNTS = 3
"""Of each kind of piece: how many were there before, their characters, and how many there are."""
LINES, PARAGRAPHS = 0, NUM_COUNTS
"""Where the counts of lines begin, and those of paragraphs."""


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
def _note(value, length, table, generation, mask, document, kind, counts):
    """Count a piece."""
    counts[document, kind + PIECES] += 1
    slot = _slot(value, table, generation, mask)
    if table[slot, GENERATION] == generation:
        counts[document, kind + DUPLICATES] += 1
        counts[document, kind + DUPLICATE_CHARACTERS] += length
    else:
        table[slot, GENERATION] = generation
        table[slot, KEY] = value


@kernel
def _num_newlines(codes, first, last):
    count = 0
    for i in range(first, last):
        count += codes[i] == NEWLINE
    return count


@kernel
def _line_end(codes, first, last):
    """Position of the first newline, `last` if there is none."""
    while first < last and codes[first] != NEWLINE:
        first += 1
    return first


@kernel
def _after_newlines(codes, first, last):
    while first < last and codes[first] == NEWLINE:
        first += 1
    return first


@entry
def pieces(codes, offsets, alive, bits, table, generation, counts):
    """Repeated lines, which are between newlines, and paragraphs, which are between two or more.

    Several newlines are one border of lines. Spaces at both ends of a document belong to its lines only.

    Args:
        codes, offsets, alive, bits: The documents.
        table: A hash table of any content, uint64[size, 4]; its size is a power of two and at least 3 more than the
            length of the longest document.
        generation: What the last use of the table has returned.
        counts: Receives `NUM_COUNTS` counts from column `LINES` on and as many from `PARAGRAPHS` on, int64[D, 6].

    Returns:
        The generation of the last document.
    """
    for document in range(len(offsets) - 1):
        if alive[document]:
            generation += ONE
            first, last = offsets[document], offsets[document + 1]
            _count_pieces(codes, first, last, bits, table, generation, document, counts)
    return generation


@kernel
def _count_pieces(codes, first, last, bits, table, generation, document, counts):
    """Count the lines, and the paragraphs by the hashes of their lines."""
    begin, finish = strip(codes, bits, first, last)
    mask = _mask(2 * (_num_newlines(codes, first, last) + 1), table)
    paragraph, value = begin, BASE
    counts[document, PARAGRAPHS + PIECES] += begin == finish
    while True:
        end = _line_end(codes, first, last)
        line = _text_hash(codes, first, end)
        _note(line, end - first, table, generation, mask, document, LINES, counts)
        behind = _after_newlines(codes, end, last)
        if end > begin and first < finish:
            if first < begin or end > finish:
                line = _text_hash(codes, max(first, begin), min(end, finish))
            value = (value ^ line) * MIX
            value ^= value >> HALF
            if behind - end > 1 or end >= finish:
                length = min(end, finish) - paragraph
                _note(value, length, table, generation, mask, document, PARAGRAPHS, counts)
                paragraph, value = behind, BASE
        if end == last:
            break
        first = behind


@entry
def lines(codes, offsets, alive, bits, table, generation, counts):
    """Repeated lines that are not blank, each behind one newline; see `pieces`. `counts` is int64[D, NUM_COUNTS]."""
    for document in range(len(offsets) - 1):
        if not alive[document]:
            continue
        generation += ONE
        first, last = offsets[document], offsets[document + 1]
        count = _num_newlines(codes, first, last) + 1
        mask = _mask(count, table)
        for _ in range(count):
            end = _line_end(codes, first, last)
            begins, ends = strip(codes, bits, first, end)
            if begins < ends:
                _note(_text_hash(codes, first, end), end - first, table, generation, mask, document, LINES, counts)
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
def ngrams(firsts, spans, hashes, alive, most, repeated, allowed, sums, slots, runs, table, generation, counts):
    """Characters in repeated runs of words.

    Args:
        firsts, spans, hashes: Words of the documents.
        alive: Which documents to look at.
        most: Lengths n of which the most frequent run counts, with a space between two words; ascending.
        repeated: Lengths n of which all repeated runs count, without spaces; none is less than one of `most`.
        allowed: Characters of each count beyond which nothing more is counted of the document; float64[D, ...].
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
        level, column, most_words = 0, 0, len(most)
        while column < counts.shape[1]:
            generation += ONE
            if column < most_words and count >= most[column]:
                n = most[column]
                best, best_at = _tally(count, n, level, runs, sums, slots, table, generation)
                counts[document, column] = best * (_characters(spans, first + best_at, n) + n - 1)
                _note_runs(count, n, slots, table, runs)
                level = n
            elif column >= most_words:
                n = repeated[column - most_words]
                counts[document, column] = _repeated(spans, first, count, n, level, runs, sums, table, generation)
            if counts[document, column] > allowed[document, column]:
                break
            column += 1
    return generation
