"""Kernels that count repeated lines, paragraphs and n-grams of a document.

They compare 64-bit hashes instead of texts. At most one document in 10^9 is affected by a collision.
"""

from __future__ import annotations

import numpy as np

from primus.data.filter.cleaning.compiler import compile_entry, compile_kernel
from primus.data.filter.cleaning.line_kernels import count_newlines, find_newline, skip_newlines, strip_spaces
from primus.data.filter.cleaning.word_hashes import HALF, MIX, SEED

BASE = np.uint64(0x9E3779B97F4A7C15)
"""Base of the polynomial over word hashes that is the hash of an n-gram."""
TWENTY = np.uint64(20)
CODE_BITS, TWO_CODE_BITS = np.uint64(21), np.uint64(42)
ZERO, ONE, TWO, THREE, FIVE, SIX = map(np.uint64, (0, 1, 2, 3, 5, 6))

KEY, GENERATION, TALLY, FIRST = 0, 1, 2, 3
"""Columns of the hash table: a hash, its generation, its number of occurrences, and the word of the first one."""

DUPLICATES, DUPLICATE_CHARACTERS, PIECES = 0, 1, 2
NUM_COUNTS = 3
"""Counts of each kind of piece: duplicates, characters of duplicates, and pieces."""
LINES, PARAGRAPHS = 0, NUM_COUNTS
"""First column of the counts of lines, and of paragraphs."""


@compile_kernel
def _find_slot(value, table, generation, mask):
    """Row of a hash in the table, or the free row for it. Rows of another generation are free."""
    # The low bits of a product depend only on the low bits of its factors, so that higher bits select the row. Linear
    # probing ends, because the table always has a free row.
    slot = (value >> TWENTY) & mask
    while table[slot, GENERATION] == generation and table[slot, KEY] != value:
        slot = (slot + ONE) & mask
    return slot


@compile_kernel
def _choose_mask(num_entries, table):
    # A short document uses only the first rows of the table, which stay in the core's cache.
    size = 16
    while size < 2 * num_entries:
        size *= 2
    return np.uint64(min(size, len(table)) - 1)


@compile_kernel
def _pack_three_codes(codes, i):
    """Three codes of 21 bits as one number."""
    return np.uint64(codes[i]) | np.uint64(codes[i + ONE]) << CODE_BITS | np.uint64(codes[i + TWO]) << TWO_CODE_BITS


@compile_kernel
def _hash_text(codes, first, last):
    """64-bit hash of codes, six at a time, in two independent chains."""
    # Two chains, because each step waits for a multiplication and the processor runs independent ones in parallel.
    # Three codes of 21 bits fill a word. The length distinguishes texts that differ only in U+0000.
    value, other = SEED, np.uint64(last - first)
    i, end = np.uint64(first), np.uint64(last)
    while i + FIVE < end:
        value = (value ^ _pack_three_codes(codes, i)) * BASE
        other = (other ^ _pack_three_codes(codes, i + THREE)) * MIX
        value ^= value >> HALF
        other ^= other >> HALF
        i += SIX
    if i + TWO < end:
        value = (value ^ _pack_three_codes(codes, i)) * BASE
        value ^= value >> HALF
        i += THREE
    rest = ZERO
    while i < end:
        rest = rest << CODE_BITS | np.uint64(codes[i])
        i += ONE
    value = (value ^ rest) * MIX
    value = (value ^ (value >> HALF) ^ other) * BASE
    return value ^ (value >> HALF)


@compile_kernel
def _count_piece(value, length, table, generation, mask, document, kind, counts):
    """Count one line or paragraph, which is a duplicate if the table has its hash."""
    counts[document, kind + PIECES] += 1
    slot = _find_slot(value, table, generation, mask)
    if table[slot, GENERATION] == generation:
        counts[document, kind + DUPLICATES] += 1
        counts[document, kind + DUPLICATE_CHARACTERS] += length
    else:
        table[slot, GENERATION] = generation
        table[slot, KEY] = value


@compile_entry
def count_pieces(codes, offsets, alive, bits, table, generation, counts):
    """Count repeated lines and paragraphs. One newline or more separates lines; two or more separate paragraphs.

    Spaces at both ends of a document belong to its lines, not to its paragraphs.

    Args:
        codes, offsets, alive, bits: The documents.
        table: A hash table of any content, uint64[size, 4]; its size is a power of two and at least 3 more than the
            length of the longest document.
        generation: The value that the last use of the table returned.
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


@compile_kernel
def _count_pieces(codes, first, last, bits, table, generation, document, counts):
    """Count the lines, and the paragraphs by the hashes of their lines."""
    begin, finish = strip_spaces(codes, bits, first, last)
    # Lines and paragraphs share the table, and there are at most as many paragraphs as lines.
    mask = _choose_mask(2 * (count_newlines(codes, first, last) + 1), table)
    paragraph, value = begin, BASE
    counts[document, PARAGRAPHS + PIECES] += begin == finish
    while True:
        end = find_newline(codes, first, last)
        line = _hash_text(codes, first, end)
        _count_piece(line, end - first, table, generation, mask, document, LINES, counts)
        behind = skip_newlines(codes, end, last)
        if end > begin and first < finish:
            # The first and the last line are hashed again without the spaces at the ends of the document.
            if first < begin or end > finish:
                line = _hash_text(codes, max(first, begin), min(end, finish))
            value = (value ^ line) * MIX
            value ^= value >> HALF
            if behind - end > 1 or end >= finish:
                length = min(end, finish) - paragraph
                _count_piece(value, length, table, generation, mask, document, PARAGRAPHS, counts)
                paragraph, value = behind, BASE
        if end == last:
            break
        first = behind


@compile_entry
def count_lines(codes, offsets, alive, bits, table, generation, counts):
    """Count repeated lines that are not blank, separated by one newline. `counts` is int64[D, NUM_COUNTS]."""
    for document in range(len(offsets) - 1):
        if not alive[document]:
            continue
        generation += ONE
        first, last = offsets[document], offsets[document + 1]
        count = count_newlines(codes, first, last) + 1
        mask = _choose_mask(count, table)
        for _ in range(count):
            end = find_newline(codes, first, last)
            begins, ends = strip_spaces(codes, bits, first, end)
            if begins < ends:
                _count_piece(
                    _hash_text(codes, first, end), end - first, table, generation, mask, document, LINES, counts
                )
            first = end + 1
    return generation


@compile_kernel
def _compute_power_of_base(n):
    value = np.uint64(1)
    for _ in range(n):
        value = value * BASE
    return value


@compile_kernel
def _select_all_words(count, positions, runs):
    """Initial candidates: every word, with the number of words from it to the end."""
    for i in range(count):
        positions[i] = i
        runs[i] = count - i
    return count


@compile_kernel
def _count_ngrams(number, n, level, positions, runs, sums, table, generation):
    """Count n-grams, and keep the words at which repeated ones begin as candidates.

    An n-gram can be repeated only if all shorter n-grams in it are. `positions` has the `number` words at which
    repeated n-grams of `level` words begin; `runs` has the number of consecutive such words from each of them.

    Returns:
        Occurrences of the most frequent n-gram, the word at which it first begins, and the number of candidates left.
    """
    mask = _choose_mask(number, table)
    power = _compute_power_of_base(n)
    best, best_at, kept = 1, 0, 0
    for candidate in range(number):
        if runs[candidate] < n - level + 1:
            continue
        i = positions[candidate]
        # `sums` are prefix hashes: this difference is the polynomial of words i to i + n - 1, modulo 2 ** 64.
        value = sums[i + n] - sums[i] * power
        slot = _find_slot(value, table, generation, mask)
        positions[kept] = i
        # From here `runs` holds table rows. `kept` is at most `candidate`, so that no unread entry is overwritten.
        runs[kept] = np.int64(slot)
        kept += 1
        if table[slot, GENERATION] != generation:
            table[slot, GENERATION] = generation
            table[slot, KEY] = value
            table[slot, TALLY] = ONE
            table[slot, FIRST] = np.uint64(i)
            continue
        table[slot, TALLY] += ONE
        tally, first = np.int64(table[slot, TALLY]), np.int64(table[slot, FIRST])
        # Of equally frequent n-grams the one that begins first counts.
        if tally > best or (tally == best and first < best_at):
            best, best_at = tally, first
    return best, best_at, _select_repeated(kept, positions, runs, table)


@compile_kernel
def _select_repeated(number, positions, runs, table):
    """Keep repeated candidates. `runs` has their rows in the table, and receives the lengths of consecutive ones."""
    kept = 0
    # Compaction without a branch: the next candidate overwrites an entry that is not kept.
    for candidate in range(number):
        positions[kept] = positions[candidate]
        kept += table[runs[candidate], TALLY] > ONE
    # Backwards, because the length at a candidate follows from the length at the next one.
    for candidate in range(kept - 1, -1, -1):
        goes_on = candidate + 1 < kept and positions[candidate + 1] == positions[candidate] + 1
        runs[candidate] = runs[candidate + 1] + 1 if goes_on else 1
    return kept


@compile_kernel
def _count_characters(spans, word, n):
    """Characters of n words."""
    total = 0
    for i in range(word, word + n):
        total += spans[i, 1] - spans[i, 0]
    return total


@compile_kernel
def _count_repeated_characters(spans, first, number, n, level, positions, runs, sums, table, generation):
    """Characters of n-grams that occurred before; counted n-grams do not overlap. See `_count_ngrams`."""
    mask = _choose_mask(number, table)
    power = _compute_power_of_base(n)
    total = free = 0
    for candidate in range(number):
        i = positions[candidate]
        # `free` is the end of the last counted n-gram, so that no word counts twice.
        if i < free or runs[candidate] < n - level + 1:
            continue
        value = sums[i + n] - sums[i] * power
        slot = _find_slot(value, table, generation, mask)
        if table[slot, GENERATION] == generation:
            total += _count_characters(spans, first + i, n)
            free = i + n
        else:
            table[slot, GENERATION] = generation
            table[slot, KEY] = value
    return total


@compile_entry
def count_ngram_characters(
    firsts, spans, hashes, alive, most, repeated, allowed, sums, positions, runs, table, generation, counts
):
    """Count characters in repeated n-grams.

    Args:
        firsts, spans, hashes: Words of the documents.
        alive: Which documents to read, bool[D].
        most: Lengths n for which the most frequent n-gram counts, with a space between two words; ascending.
        repeated: Lengths n for which all repeated n-grams count, without spaces; none is less than one of `most`.
        allowed: Limit of each count; the first count above its limit ends the document. float64[D, ...].
        sums, positions, runs: Room for one more than the words of any document: uint64, int32, int32.
        table, generation: A hash table; see `count_pieces`.
        counts: Receives the characters for each of `most`, then for each of `repeated`; int64[D, ...].

    Returns:
        The last generation.
    """
    for document in range(len(firsts) - 1):
        if not alive[document]:
            continue
        first, count = firsts[document], firsts[document + 1] - firsts[document]
        # Each word of `sums`, `positions` and `runs` is written before it is read, so that the caller need not clear
        # them.
        sums[0] = ZERO
        for i in range(count):
            sums[i + 1] = sums[i] * BASE + hashes[first + i]
        number = _select_all_words(count, positions, runs)
        level, column, most_words = 1, 0, len(most)
        # A new generation for each count empties the table without writing to it.
        while column < counts.shape[1]:
            generation += ONE
            if column < most_words and count >= most[column]:
                n = most[column]
                best, best_at, number = _count_ngrams(number, n, level, positions, runs, sums, table, generation)
                counts[document, column] = best * (_count_characters(spans, first + best_at, n) + n - 1)
                level = n
            elif column >= most_words:
                n = repeated[column - most_words]
                characters = _count_repeated_characters(
                    spans, first, number, n, level, positions, runs, sums, table, generation
                )
                counts[document, column] = characters
            if counts[document, column] > allowed[document, column]:
                break
            column += 1
    return generation
