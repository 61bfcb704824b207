"""Kernels that count words, marks and lines for the quality rules."""

from __future__ import annotations

import numpy as np

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.compiler import compile_entry, compile_kernel
from primus.data.filter.cleaning.line_kernels import NEWLINE, find_line_end, find_newline, skip_break, strip_spaces
from primus.data.filter.cleaning.word_kernels import ENDS_SENTENCE, HAS_ALPHA, HAS_NO_SYMBOL, IS_PUNCTUATION

TERMINAL = characters.TERMINAL

DOT, HASH, ELLIPSIS = ord("."), ord("#"), 0x2026
DOT_CODE, HASH_CODE, ELLIPSIS_CODE = np.uint32(DOT), np.uint32(HASH), np.uint32(ELLIPSIS)
ONE, TWO = np.uint64(1), np.uint64(2)
BULLETS = (0x2022, ord("-"))
"""First characters of a line in a list."""

WORDS, REAL_WORDS, REAL_CHARACTERS, ALPHA_WORDS, STOP_WORDS = 0, 1, 2, 3, 4
HASHES, ELLIPSES, LINES, BULLET_LINES, ELLIPSIS_LINES = 5, 6, 7, 8, 9
NUM_GOPHER = 10

LOW_BITS = np.uint64(63)
"""Bits of a hash that select one of 64 bits."""

PROSE_LINES, ENDED_LINES, SHORT_LINES, NEWLINES = 0, 1, 2, 3
NUM_FINEWEB = 4


@compile_entry
def count_gopher(codes, offsets, alive, bits, firsts, spans, hashes, flags, stops, longest_stop, counts):
    """Counts of the Gopher quality rules.

    Args:
        codes, offsets: The documents.
        alive: Which documents to read, bool[D].
        bits: Table of `characters.build_character_bits`.
        firsts, spans, hashes, flags: Their words.
        stops, longest_stop: Hashes of the stop words, at most 63, and the length of the longest.
        counts: Receives ``WORDS`` to ``ELLIPSIS_LINES`` of each document, int64[D, NUM_GOPHER].
    """
    for document in range(len(offsets) - 1):
        if alive[document]:
            _count_words(document, firsts, spans, hashes, flags, stops, longest_stop, counts)
            _count_marks(codes, offsets[document], offsets[document + 1], document, counts)
            _count_lines(codes, bits, offsets[document], offsets[document + 1], document, counts)


@compile_kernel
def _count_words(document, firsts, spans, hashes, flags, stops, longest_stop, counts):
    real = characters_ = alpha = found = sieve = 0
    # The lowest six bits of a hash select a bit of `sieve`: one shift rejects most words before the search.
    for stop in range(len(stops)):
        sieve |= 1 << np.int64(stops[stop] & LOW_BITS)
    for word in range(firsts[document], firsts[document + 1]):
        length = spans[word, 1] - spans[word, 0]
        is_real = flags[word] & HAS_NO_SYMBOL != 0
        # Additions instead of branches, because the flags of words are unpredictable.
        real += is_real
        characters_ += is_real * length
        alpha += flags[word] & HAS_ALPHA != 0
        if (sieve >> np.int64(hashes[word] & LOW_BITS)) & (length <= longest_stop):
            for stop in range(len(stops)):
                if hashes[word] == stops[stop]:
                    # One bit per stop word, so that a repeated stop word counts once. The sign bit limits them to 63.
                    found |= 1 << stop
    counts[document, WORDS] = firsts[document + 1] - firsts[document]
    counts[document, REAL_WORDS] = real
    counts[document, REAL_CHARACTERS] = characters_
    counts[document, ALPHA_WORDS] = alpha
    while found:
        counts[document, STOP_WORDS] += found & 1
        found >>= 1


@compile_kernel
def _count_marks(codes, first, last, document, counts):
    """Count # and ellipses. The loops have no branches, so that they vectorize; three dots are rare."""
    hashes, ellipses, threes = np.uint32(0), np.uint32(0), np.uint32(0)
    for code in codes[first:last]:
        hashes += np.uint32(code == HASH_CODE)
        ellipses += np.uint32(code == ELLIPSIS_CODE)
    # Overlapping triples are counted here only to learn whether there are any; the exact count is sequential.
    for i in range(np.uint64(first), np.uint64(max(last - 2, first))):
        dots = (codes[i] == DOT_CODE) & (codes[i + ONE] == DOT_CODE) & (codes[i + TWO] == DOT_CODE)
        threes += np.uint32(dots)
    counts[document, HASHES] = hashes
    counts[document, ELLIPSES] = ellipses + (_count_three_dots(codes, first, last) if threes else 0)


@compile_kernel
def _count_three_dots(codes, first, last):
    """Number of ``...`` that do not overlap."""
    dots = count = 0
    for i in range(first, last):
        dots = dots + 1 if codes[i] == DOT else 0
        if dots == 3:
            count += 1
            dots = 0
    return count


@compile_kernel
def _count_lines(codes, bits, first, last, document, counts):
    lines = bullets = ellipses = 0
    while first < last:
        end = find_line_end(codes, bits, first, last)
        lines += 1
        begins, ends = strip_spaces(codes, bits, first, end)
        if begins < ends:
            if codes[begins] in BULLETS:
                bullets += 1
            if _ends_in_ellipsis(codes, begins, ends):
                ellipses += 1
        first = skip_break(codes, end, last)
    counts[document, LINES] = lines
    counts[document, BULLET_LINES] = bullets
    counts[document, ELLIPSIS_LINES] = ellipses


@compile_kernel
def _ends_in_ellipsis(codes, first, last):
    if codes[last - 1] == ELLIPSIS:
        return True
    return last - first >= 3 and codes[last - 1] == DOT and codes[last - 2] == DOT and codes[last - 3] == DOT


@compile_entry
def count_fineweb(codes, offsets, alive, bits, short_length, counts):
    """Counts of the FineWeb quality rules over the lines that are not blank; int64[D, NUM_FINEWEB]."""
    for document in range(len(offsets) - 1):
        if not alive[document]:
            continue
        first, last = offsets[document], offsets[document + 1]
        while first <= last:
            end = find_newline(codes, first, last)
            begins, ends = strip_spaces(codes, bits, first, end)
            if begins < ends:
                counts[document, PROSE_LINES] += 1
                # The last character of the raw line decides, as in datatrove: a space after the mark hides it.
                if bits[codes[end - 1]] & TERMINAL:
                    counts[document, ENDED_LINES] += 1
                if end - first <= short_length:
                    counts[document, SHORT_LINES] += 1
            if end < last:
                counts[document, NEWLINES] += 1
            first = end + 1


@compile_entry
def count_long_lines(codes, offsets, alive, length, counts):
    """Lines of at least `length` characters of each document, int64[D]."""
    for document in range(len(offsets) - 1):
        if not alive[document]:
            continue
        first, last = offsets[document], offsets[document + 1]
        while first <= last:
            end = find_newline(codes, first, last)
            if end - first >= length:
                counts[document] += 1
            first = end + 1


@compile_entry
def count_sentences(codes, offsets, alive, firsts, spans, flags, counts):
    """Sentences of each document, int64[D]. A sentence begins at each line, and after a mark that ends a sentence.

    As in spaCy's sentencizer, more marks may follow the first, and a second space begins the next sentence.
    """
    for document in range(len(offsets) - 1):
        if not alive[document]:
            continue
        # State: `ended` is set after a mark that ends a sentence until a word begins the next one; `position` is the
        # end of the word before.
        ended, position, count = False, offsets[document], 0
        for word in range(firsts[document], firsts[document + 1]):
            gap = spans[word, 0] - position
            if count == 0 or _has_newline(codes, position, spans[word, 0]) or (ended and gap > 1):
                count += 1
                ended = False
            position = spans[word, 1]
            if flags[word] & ENDS_SENTENCE:
                ended = True
            elif ended and not flags[word] & IS_PUNCTUATION:
                count += 1
                ended = False
        counts[document] = count


@compile_kernel
def _has_newline(codes, first, last):
    while first < last and codes[first] != NEWLINE:
        first += 1
    return first < last
