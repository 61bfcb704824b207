"""Kernels that split texts into words. `codes` are code points, uint32[N]; positions are indices into it."""

from __future__ import annotations

import numpy as np

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.address_kernels import is_address
from primus.data.filter.cleaning.affix_kernels import measure_infix, measure_prefix, measure_suffix
from primus.data.filter.cleaning.compiler import compile_entry, compile_kernel
from primus.data.filter.cleaning.short_form_kernels import find_in_table, find_short_form, is_in_sieve
from primus.data.filter.cleaning.word_hashes import SEED, add_code, mix_hash

SPACE = np.uint32(characters.SPACE)
ALPHA = characters.ALPHA
LOWER = characters.LOWER
SUFFIX = characters.SUFFIX
DIGIT = characters.DIGIT
FULL_STOP = characters.FULL_STOP
SYMBOL = characters.SYMBOL
PUNCTUATION_CATEGORY = characters.PUNCTUATION_CATEGORY
TERMINAL = characters.TERMINAL
LETTER_OR_DIGIT = np.uint32(ALPHA | DIGIT)

HAS_ALPHA = 1
HAS_NO_SYMBOL = 2
"""At least one character is not a symbol: the word counts for the quality rules."""
IS_PUNCTUATION = 4
"""All characters are punctuation."""
ENDS_SENTENCE = 8

DOT = ord(".")
ONE, EIGHT, BYTE = np.uint64(1), np.uint64(8), np.uint64(255)


@compile_entry
def split_spacy_like(codes, offsets, alive, bits, sieve, table, units, stack, firsts, spans, hashes, flags):
    """Words of each document: their positions, hashes and flags.

    Most runs between spaces are letters or digits, with at most one mark after them. For these, one pass over the
    characters gives all results. The rules split other runs.

    Args:
        codes: Code points of all documents.
        offsets: First position of each document, and the end of the last, int64[D + 1].
        alive: Which documents to read, bool[D]; the others have no words.
        bits: Table of `characters.build_character_bits`.
        sieve, table: Runs of characters whose words are listed; see `short_form_kernels`.
        units: Units of measurement; see `affix_kernels`.
        stack: Room for the suffixes of one run, int64.
        firsts: Receives the number of the first word of each document, and the number of words, int64[D + 1].
        spans: Receives the first position of each word, and the one after its last, int32[capacity, 2].
        hashes, flags: Receive hash and flags of each word, uint64[capacity] and uint8[capacity].

    Returns:
        The number of words, which may exceed the capacity.
    """
    count = 0
    for document in range(len(offsets) - 1):
        firsts[document] = count
        position, end = offsets[document], offsets[document + 1]
        if not alive[document]:
            continue
        while position < end:
            if bits[codes[position]] & SPACE:
                position += 1
                continue
            first = position
            position, marks, seen, value, before = _measure_run(codes, bits, first, end)
            # The hashes of the measuring pass are those of the word, with or without the mark: nothing is read twice.
            if _is_plain(codes, bits, first, position, marks, seen, value, before, sieve, table):
                last = position - marks
                count = _put_plain(first, last, before if marks else value, seen, count, spans, hashes, flags)
                if marks:
                    count = _put_mark(codes, bits, last, count, spans, hashes, flags)
                continue
            begin = count
            count = _put_run(codes, bits, first, position, marks, seen, sieve, table, units, stack, spans, count)
            # Words beyond the capacity are counted and not described: the caller repeats the call with more room.
            for word in range(begin, min(count, len(spans))):
                hashes[word], flags[word] = _describe_word(codes, bits, spans[word, 0], spans[word, 1])
    firsts[len(offsets) - 1] = count
    return count


@compile_kernel
def _measure_run(codes, bits, position, end):
    """Measure a run of characters without spaces.

    Returns:
        Its end; its number of marks, which are neither letters nor digits; the bits of all characters; the hash of all
        codes; and the hash of the codes before the last mark.
    """
    # The position is unsigned, because a signed index may count from the end, which needs a check per character. The
    # same scan hashes and classifies the characters, which saves a second pass over most words.
    marks, seen = 0, np.uint32(0)
    value = before = SEED
    unsigned, stop = np.uint64(position), np.uint64(end)
    while unsigned < stop:
        code = codes[unsigned]
        kind = bits[code]
        if kind & SPACE:
            break
        if not kind & LETTER_OR_DIGIT:
            marks += 1
            before = value
        seen |= kind
        value = add_code(value, code)
        unsigned += ONE
    return np.int64(unsigned), marks, np.int64(seen), value, before


@compile_kernel
def _is_plain(codes, bits, first, end, marks, seen, value, before, sieve, table):
    """Whether a run of characters is one word, or one word and a mark after it."""
    # The tests are in the order of their cost. A mark other than the last character fails in `_has_plain_end`.
    if marks > 1:
        return False
    last = end - marks
    if marks and not _has_plain_end(codes, bits, first, end):
        return False
    # Letters after a digit may be a unit (5km), which is a separate word.
    if seen & DIGIT and not bits[codes[last - 1]] & DIGIT:
        return False
    # A short form is looked up without the mark (dont) and with it (Mr.).
    if is_in_sieve(codes, first, last, sieve) and find_in_table(mix_hash(before if marks else value), table):
        return False
    return not (marks and is_in_sieve(codes, first, end, sieve) and find_in_table(mix_hash(value), table))


@compile_kernel
def _has_plain_end(codes, bits, first, last):
    """Whether the only mark of a run is at its end, after two or more characters, the last lower-case or a digit."""
    if last - first < 3 or not bits[codes[last - 2]] & (LOWER | DIGIT):
        return False
    kind = bits[codes[last - 1]]
    return not kind & LETTER_OR_DIGIT and (kind & SUFFIX != 0 or codes[last - 1] == DOT)


@compile_kernel
def _put_plain(first, last, value, seen, count, spans, hashes, flags):
    """Add a word of letters and digits."""
    if count < len(spans):
        spans[count, 0] = first
        spans[count, 1] = last
        hashes[count] = mix_hash(value)
        flags[count] = HAS_NO_SYMBOL | (HAS_ALPHA if seen & ALPHA else 0)
    return count + 1


@compile_kernel
def _put_mark(codes, bits, position, count, spans, hashes, flags):
    """Add a word of one character."""
    if count < len(spans):
        spans[count, 0] = position
        spans[count, 1] = position + 1
        hashes[count], flags[count] = _describe_word(codes, bits, position, position + 1)
    return count + 1


@compile_kernel
def _describe_word(codes, bits, first, last):
    """Hash and flags of a word."""
    # `some` has the bits of any character, `all_` those of every character.
    value, some, all_ = SEED, 0, -1
    for i in range(first, last):
        kind = np.int64(bits[codes[i]])
        value = add_code(value, codes[i])
        some |= kind
        all_ &= kind
    flag = HAS_ALPHA if some & ALPHA else 0
    if not all_ & SYMBOL:
        flag |= HAS_NO_SYMBOL
    if all_ & PUNCTUATION_CATEGORY:
        flag |= IS_PUNCTUATION
    if last - first == 1 and some & TERMINAL:
        flag |= ENDS_SENTENCE
    return mix_hash(value), flag


@compile_kernel
def _put_run(codes, bits, first, last, marks, seen, sieve, table, units, stack, spans, count):
    """Add the words of a run of characters without spaces: prefixes, the words between the affixes, suffixes.

    Only a run with a dot can be an address. A run of letters and digits is one word.
    """
    depth = 0
    # As in spaCy, affixes are removed one by one from both ends until the rest is a short form or has none. Suffixes
    # are found from the end, so that the stack returns them in the order of the text.
    special = find_short_form(codes, first, last, sieve, table)
    while not special:
        before, after, special = _find_affixes(codes, bits, first, last, seen, sieve, table, units)
        # A full stack ends the removal of suffixes, so that no write is out of bounds.
        if depth == len(stack):
            after = 0
        if not before and not after:
            break
        if before:
            count = _put_word(first, first + before, spans, count)
            first += before
            marks -= before
        if after:
            marks -= _count_marks(codes, bits, last - after, last)
            stack[depth] = last
            depth += 1
            last -= after
    if special:
        count = _put_special(first, special, spans, count)
    elif first < last and (marks == 0 or (seen & FULL_STOP and is_address(codes, bits, first, last))):
        count = _put_word(first, last, spans, count)
    elif first < last:
        count = _put_infixes(codes, bits, first, last, spans, count)
    while depth > 0:
        depth -= 1
        count = _put_word(last, stack[depth], spans, count)
        last = stack[depth]
    return count


@compile_kernel
def _count_marks(codes, bits, first, last):
    """Number of characters that are neither letters nor digits."""
    count = 0
    for i in range(first, last):
        count += not bits[codes[i]] & LETTER_OR_DIGIT
    return count


@compile_kernel
def _find_affixes(codes, bits, first, last, seen, sieve, table, units):
    """Lengths of the prefix and the suffix to remove, and the words that the table lists for the rest."""
    before = measure_prefix(codes, bits, first, last)
    after = measure_suffix(codes, bits, first + before, last, seen, units)
    if not before and not after:
        return 0, 0, np.uint64(0)
    if before and after:
        # With both affixes, the rest is first looked up with one of them: a short form may contain the other.
        special = find_short_form(codes, first + before, last, sieve, table)
        if special:
            return before, 0, special
        special = find_short_form(codes, first, last - after, sieve, table)
        if special:
            return 0, after, special
    return before, after, find_short_form(codes, first + before, last - after, sieve, table)


@compile_kernel
def _put_word(first, last, spans, count):
    """Add the position of a word; words beyond the capacity are only counted."""
    if count < len(spans):
        spans[count, 0] = first
        spans[count, 1] = last
    return count + 1


@compile_kernel
def _put_special(first, lengths, spans, count):
    """Add the words that the table lists for a run of characters."""
    # One byte for each word, the first in the lowest.
    while lengths:
        last = first + np.int64(lengths & BYTE)
        count = _put_word(first, last, spans, count)
        first = last
        lengths = lengths >> EIGHT
    return count


@compile_kernel
def _put_infixes(codes, bits, first, last, spans, count):
    """Split a run of characters without prefix and suffix at its infixes, and add the words."""
    begin, i = first, first
    while i < last:
        length = measure_infix(codes, bits, first, i, last)
        if length and i > first:
            if codes[i] == DOT and length == 1 and i - begin == 1:  # ``a.`` is one word, as an abbreviation is
                count = _put_word(begin, i + 1, spans, count)
            else:
                if i > begin:
                    count = _put_word(begin, i, spans, count)
                count = _put_word(i, i + length, spans, count)
            begin = i + length
        i += length if length else 1
    if begin < last:
        count = _put_word(begin, last, spans, count)
    return count


@compile_entry
def split_whitespace(codes, offsets, alive, bits, firsts, spans, hashes, flags):
    """Words between spaces; see `split_spacy_like` for the arguments."""
    count = 0
    for document in range(len(offsets) - 1):
        firsts[document] = count
        position, end = offsets[document], offsets[document + 1]
        while position < end and alive[document]:
            if bits[codes[position]] & SPACE:
                position += 1
                continue
            first = position
            while position < end and not bits[codes[position]] & SPACE:
                position += 1
            if count < len(spans):
                hashes[count], flags[count] = _describe_word(codes, bits, first, position)
            count = _put_word(first, position, spans, count)
    firsts[len(offsets) - 1] = count
    return count
