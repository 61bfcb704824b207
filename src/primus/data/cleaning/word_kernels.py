"""Loops that find words. Codes are Unicode code points; positions count them."""

from __future__ import annotations

import numpy as np

from primus.data.cleaning import characters
from primus.data.cleaning.compiled import entry, kernel

SPACE = characters.SPACE
ALPHA = characters.ALPHA
LOWER = characters.LOWER
UPPER = characters.UPPER
PREFIX = characters.PREFIX
SUFFIX = characters.SUFFIX
QUOTE = characters.QUOTE
ICON = characters.ICON
DIGIT = characters.DIGIT
DECIMAL = characters.DECIMAL
CURRENCY = characters.CURRENCY
SYMBOL = characters.SYMBOL
PUNCTUATION_CATEGORY = characters.PUNCTUATION_CATEGORY
TERMINAL = characters.TERMINAL
LETTER_OR_DIGIT = ALPHA | DIGIT

LONGEST_SPECIAL = 16
"""Characters of the longest run that is looked up among those divided by a table."""

SEED = np.uint64(0xCBF29CE484222325)
FACTOR = np.uint64(0x100000001B3)
MIX = np.uint64(0xBF58476D1CE4E5B9)
HALF = np.uint64(32)

HAS_ALPHA = 1
HAS_NO_SYMBOL = 2
"""A character that is none: the word counts for the quality rules."""
IS_PUNCTUATION = 4
"""Nothing but punctuation."""
ENDS_SENTENCE = 8

PLUS, COMMA, HYPHEN, DOT = ord("+"), ord(","), ord("-"), ord(".")
COLON, SLASH, AT, CLOSING = ord(":"), ord("/"), ord("@"), ord(")")
APOSTROPHE, RIGHT_QUOTE = ord("'"), 0x2019
PERCENT, SQUARED, UNDERSCORE, ELLIPSIS = ord("%"), 0xB2, ord("_"), 0x2026
LONG_DASH, SHORT_DASH = 0x2014, 0x2013
DASHES = (HYPHEN, LONG_DASH, SHORT_DASH, ord("~"))
OPERATORS = (PLUS, HYPHEN, ord("*"), ord("^"))
RELATIONS = (COLON, SLASH, ord("<"), ord(">"), ord("="))
IN_SCHEME = (PLUS, HYPHEN, DOT, UNDERSCORE)
PATHS = (SLASH, ord("?"), ord("#"))
SMALL_AND_CAPITAL_S = (ord("s"), ord("S"))


@kernel
def _mixed(value):
    value = (value ^ (value >> HALF)) * MIX
    return value ^ (value >> HALF)


@kernel
def word_hash(codes, first, last):
    """64-bit hash of some codes (FNV-1a, then mixed)."""
    value = SEED
    for i in range(first, last):
        value = (value ^ np.uint64(codes[i])) * FACTOR
    return _mixed(value)


@kernel
def sieve_slot(first, last, length, sieve):
    """Place in a sieve that tells whether a run with these ends and this length may be in the table."""
    return (np.int64(first) * 31 + np.int64(last) * 7 + length) & (len(sieve) - 1)


@kernel
def _special(codes, first, last, sieve, table):
    """How a table divides a run of characters: lengths of the words, a byte each; 0 if the run is not there.

    `table` is a hash table with open addressing: uint64[a power of two, 2] of hashes and lengths. `sieve` is bool[a
    power of two], small enough to stay in the processor's nearest cache.
    """
    if last - first > LONGEST_SPECIAL or last <= first:
        return np.uint64(0)
    if not sieve[sieve_slot(codes[first], codes[last - 1], last - first, sieve)]:
        return np.uint64(0)
    value = word_hash(codes, first, last)
    mask = np.uint64(len(table) - 1)
    slot = value & mask
    while table[slot, 0] != np.uint64(0):
        if table[slot, 0] == value:
            return table[slot, 1]
        slot = (slot + np.uint64(1)) & mask
    return np.uint64(0)


@kernel
def _prefix(codes, bits, first, last):
    """Length of what is divided from the beginning of a run of characters."""
    if first >= last:
        return 0
    code = codes[first]
    if bits[code] & PREFIX:
        return 1
    if code == DOT:
        end = first + 1
        while end < last and codes[end] == DOT:
            end += 1
        return end - first if end - first > 1 else 0
    if code == PLUS and not (first + 1 < last and bits[codes[first + 1]] & DIGIT):
        return 1
    return 0


@kernel
def _dot_divides(codes, bits, first, last):
    """Whether the dot at the end of a run of characters ends a sentence rather than an abbreviation."""
    if last - first < 2:
        return False
    before = codes[last - 2]
    kind = bits[before]
    if kind & (DIGIT | LOWER | SUFFIX) and not kind & ICON:
        return True
    if before in (PERCENT, SQUARED, HYPHEN, PLUS):
        return True
    return bool(last - first > 2 and kind & UPPER and bits[codes[last - 3]] & UPPER)


@kernel
def _suffix(codes, bits, first, last, units):
    """Length of what is divided from the end of a run of characters."""
    if first >= last:
        return 0
    code = codes[last - 1]
    kind = bits[code]
    if kind & SUFFIX:
        return 2 if code == COLON and last - first > 1 and codes[last - 2] == CLOSING else 1
    if code == DOT:
        start = last - 1
        while start > first and codes[start - 1] == DOT:
            start -= 1
        if last - start > 1:
            return last - start
        return 1 if _dot_divides(codes, bits, first, last) else 0
    if last - first > 1 and code in SMALL_AND_CAPITAL_S:
        before = codes[last - 2]
        if before in (APOSTROPHE, RIGHT_QUOTE):
            return 2
    if last - first > 1 and bits[codes[last - 2]] & DIGIT and (code == PLUS or kind & CURRENCY):
        return 1
    return _unit(codes, bits, first, last, units)


@kernel
def _unit(codes, bits, first, last, units):
    """Length of a unit of measurement after a digit; rows of `units` are a length and that many codes."""
    start = last
    while start > first and last - start < units.shape[1] and not bits[codes[start - 1]] & DIGIT:
        start -= 1
    length = last - start
    if start == first or length == 0 or length >= units.shape[1]:
        return 0
    for row in range(len(units)):
        if units[row, 0] != length:
            continue
        same = True
        for i in range(length):
            if codes[start + i] != units[row, i + 1]:
                same = False
                break
        if same:
            return length
    return 0


@kernel
def _is_host_character(code, kind):
    return kind & (ALPHA | DIGIT) or code in (HYPHEN, UNDERSCORE) or code >= 0xA1


@kernel
def _is_address(codes, bits, first, last):
    """Whether a run of characters is a web or mail address, or a name with a dot like ``file.txt``."""
    begin = _after_scheme(codes, bits, first, last)
    for i in range(last - 1, begin, -1):
        if codes[i] == AT:
            return _is_host(codes, bits, i + 1, last) or _is_host(codes, bits, begin, last)
    return _is_host(codes, bits, begin, last)


@kernel
def _after_scheme(codes, bits, first, last):
    """Position behind ``https://`` or the like; `first` if there is none."""
    i = first
    while i < last and (bits[codes[i]] & (ALPHA | DECIMAL) or codes[i] in IN_SCHEME):
        i += 1
    if i - first >= 2 and i + 2 < last and codes[i] == COLON and codes[i + 1] == SLASH and codes[i + 2] == SLASH:
        return i + 3
    return first


@kernel
def _is_host(codes, bits, first, last):
    """Whether there is a host name or IPv4 address, perhaps with a port and a path."""
    end, label, num_labels, numbers = first, first, 0, True
    while end < last and (_is_host_character(codes[end], bits[codes[end]]) or codes[end] == DOT):
        if codes[end] == DOT:
            if not _is_label(codes, bits, label, end):
                return False
            label, num_labels = end + 1, num_labels + 1
        elif not bits[codes[end]] & DIGIT:
            numbers = False
        end += 1
    if num_labels == 0 or end == label:
        return False
    if numbers:
        if num_labels != 3:
            return False
    else:
        if end - label < 2 or end - label > 63:
            return False
        for i in range(label, end):
            if not bits[codes[i]] & LOWER:
                return False
    return _is_path(codes, bits, end, last)


@kernel
def _is_label(codes, bits, first, last):
    """Whether characters between dots of a host name begin and end as they must."""
    if first >= last or last - first > 64:
        return False
    return (
        codes[first] != HYPHEN
        and codes[first] != ord("_")
        and codes[last - 1] != HYPHEN
        and codes[last - 1] != ord("_")
    )


@kernel
def _is_path(codes, bits, first, last):
    """Whether the rest of an address is a port, a path, both or nothing."""
    if first < last and codes[first] == COLON:
        first += 1
        begin = first
        while first < last and bits[codes[first]] & DIGIT:
            first += 1
        if first - begin < 2 or first - begin > 5:
            return False
    return first == last or codes[first] in PATHS


@kernel
def _infix(codes, bits, first, i, last):
    """Length of what divides a run of characters at position `i` of it."""
    code = codes[i]
    kind = bits[code]
    if kind & (ALPHA | DIGIT):
        return 0
    if kind & ICON or code == ELLIPSIS:
        return 1
    if code == DOT and i + 1 < last and codes[i + 1] == DOT:
        end = i + 2
        while end < last and codes[end] == DOT:
            end += 1
        return end - i
    if i == first or i + 1 >= last:
        return 0
    before, after = bits[codes[i - 1]], bits[codes[i + 1]]
    if code == DOT:
        return 1 if before & (LOWER | QUOTE) and after & (UPPER | QUOTE) else 0
    if code == COMMA:
        return 1 if before & ALPHA and after & ALPHA else 0
    if code in OPERATORS and before & DIGIT and (after & DIGIT or codes[i + 1] == HYPHEN):
        return 1
    if code in DASHES:
        return _dashes(codes, bits, i, last) if before & (ALPHA | DIGIT) else 0
    if code in RELATIONS:
        return 1 if before & (ALPHA | DIGIT) and after & ALPHA else 0
    return 0


@kernel
def _dashes(codes, bits, first, last):
    """Length of a dash between letters, which is up to three hyphens or two long dashes."""
    most = 3 if codes[first] == HYPHEN else (2 if codes[first] == LONG_DASH else 1)
    end = first + 1
    while end < last and end - first < most and codes[end] == codes[first]:
        end += 1
    return end - first if end < last and bits[codes[end]] & ALPHA else 0


@kernel
def _put(first, last, spans, count):
    """Add a word; words beyond the capacity are only counted."""
    if count < len(spans):
        spans[count, 0] = first
        spans[count, 1] = last
    return count + 1


@kernel
def _put_infixes(codes, bits, first, last, spans, count):
    """Add the words of a run of characters that has no prefix and no suffix."""
    begin, i = first, first
    while i < last:
        length = _infix(codes, bits, first, i, last)
        if length and i > first:
            if codes[i] == DOT and length == 1 and i - begin == 1:  # ``a.`` is one word, as an abbreviation is
                count = _put(begin, i + 1, spans, count)
            else:
                if i > begin:
                    count = _put(begin, i, spans, count)
                count = _put(i, i + length, spans, count)
            begin = i + length
        i += length if length else 1
    if begin < last:
        count = _put(begin, last, spans, count)
    return count


@kernel
def _put_special(first, lengths, spans, count):
    """Add the words that a table gives for a run of characters."""
    while lengths:
        last = first + np.int64(lengths & np.uint64(255))
        count = _put(first, last, spans, count)
        first = last
        lengths = lengths >> np.uint64(8)
    return count


@kernel
def _affixes(codes, bits, first, last, sieve, table, units):
    """Lengths of the prefix and suffix to take off, and how the table divides what is left."""
    before = _prefix(codes, bits, first, last)
    after = _suffix(codes, bits, first + before, last, units)
    if before:
        special = _special(codes, first + before, last, sieve, table)
        if special:
            return before, 0, special
    if after:
        special = _special(codes, first, last - after, sieve, table)
        if special:
            return 0, after, special
    return before, after, _special(codes, first + before, last - after, sieve, table)


@kernel
def _put_run(codes, bits, first, last, dots, sieve, table, units, stack, spans, count):
    """Add the words of a run of characters without spaces: affixes, then what is between them.

    No run without a dot is an address.
    """
    depth = 0
    special = _special(codes, first, last, sieve, table)
    while not special:
        before, after, special = _affixes(codes, bits, first, last, sieve, table, units)
        if depth == len(stack):
            after = 0
        if not before and not after:
            break
        if before:
            count = _put(first, first + before, spans, count)
            first += before
        if after:
            stack[depth] = last
            depth += 1
            last -= after
    if special:
        count = _put_special(first, special, spans, count)
    elif dots and first < last and _is_address(codes, bits, first, last):
        count = _put(first, last, spans, count)
    elif first < last:
        count = _put_infixes(codes, bits, first, last, spans, count)
    while depth > 0:
        depth -= 1
        count = _put(last, stack[depth], spans, count)
        last = stack[depth]
    return count


@kernel
def _ends_plainly(codes, bits, first, last):
    """Whether the one mark of a run of characters is at its end, behind two or more letters or a digit."""
    if last - first < 3 or not bits[codes[last - 2]] & (LOWER | DIGIT):
        return False
    return bool(bits[codes[last - 1]] & SUFFIX) or codes[last - 1] == DOT


@entry
def split_spacy_like(codes, offsets, alive, bits, sieve, table, units, stack, firsts, spans):
    """Position of the first character of each word of each document, and of the one behind the last.

    Args:
        codes: Code points of all documents.
        offsets: Where each document begins, and where the last ends.
        alive: Which documents to look at; the others have no words.
        bits: `characters.classes`.
        sieve, table: Runs of characters that are divided otherwise; see `_special`.
        units: Units of measurement; see `_unit`.
        stack: Room for as many suffixes as one run may have.
        firsts: Receives the number of the first word of each document, and the number of words.
        spans: Receives the positions.

    Returns:
        The number of words, which may be more than there is room for.
    """
    count = 0
    for document in range(len(offsets) - 1):
        firsts[document] = count
        position, end = offsets[document], offsets[document + 1]
        while position < end and alive[document]:
            if bits[codes[position]] & SPACE:
                position += 1
                continue
            first = position
            position, marks, dots, seen = _run(codes, bits, first, end)
            last = position - marks
            plain = not seen & DIGIT or bool(bits[codes[last - 1]] & DIGIT)
            if marks:
                plain = plain and marks == 1 and _ends_plainly(codes, bits, first, position)
            if plain:
                plain = not _special(codes, first, last, sieve, table)
            if plain and marks:
                plain = not _special(codes, first, position, sieve, table)
            if not plain:
                count = _put_run(codes, bits, first, position, dots, sieve, table, units, stack, spans, count)
                continue
            count = _put(first, last, spans, count)
            if marks:
                count = _put(last, position, spans, count)
    firsts[len(offsets) - 1] = count
    return count


@kernel
def _run(codes, bits, position, end):
    """End of a run of characters without spaces, how many are no letters or digits, how many are dots, and all bits."""
    marks = dots = seen = 0
    while position < end:
        code = codes[position]
        kind = np.int64(bits[code])
        if kind & SPACE:
            break
        seen |= kind
        marks += (kind & LETTER_OR_DIGIT) == 0
        dots += code == DOT
        position += 1
    return position, marks, dots, seen


@entry
def split_whitespace(codes, offsets, alive, bits, firsts, spans):
    """Words between spaces; see `split_spacy_like`."""
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
            count = _put(first, position, spans, count)
    firsts[len(offsets) - 1] = count
    return count


@entry
def describe(codes, bits, spans, hashes, flags):
    """Hash and flags of each word."""
    for word in range(len(spans)):
        first, last = spans[word, 0], spans[word, 1]
        value, flag = SEED, IS_PUNCTUATION
        if last - first == 1 and bits[codes[first]] & TERMINAL:
            flag |= ENDS_SENTENCE
        for i in range(first, last):
            code = codes[i]
            kind = bits[code]
            value = (value ^ np.uint64(code)) * FACTOR
            if kind & ALPHA:
                flag |= HAS_ALPHA
            if not kind & SYMBOL:
                flag |= HAS_NO_SYMBOL
            if not kind & PUNCTUATION_CATEGORY:
                flag &= ~IS_PUNCTUATION
        hashes[word] = _mixed(value)
        flags[word] = flag
