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
CURRENCY = characters.CURRENCY
SYMBOL = characters.SYMBOL

LONGEST_SPECIAL = 16
"""Characters of the longest run that is looked up among those divided by a table."""

SEED = np.uint64(0xCBF29CE484222325)
FACTOR = np.uint64(0x100000001B3)
MIX = np.uint64(0xBF58476D1CE4E5B9)
HALF = np.uint64(32)

HAS_ALPHA = 1
HAS_NO_SYMBOL = 2

PLUS, COMMA, HYPHEN, DOT = ord("+"), ord(","), ord("-"), ord(".")
COLON, SLASH, AT = ord(":"), ord("/"), ord("@")
APOSTROPHE, RIGHT_QUOTE = ord("'"), 0x2019
PERCENT, SQUARED, UNDERSCORE, ELLIPSIS = ord("%"), 0xB2, ord("_"), 0x2026
LONG_DASH, SHORT_DASH = 0x2014, 0x2013
DASHES = (HYPHEN, LONG_DASH, SHORT_DASH, ord("~"))
OPERATORS = (PLUS, HYPHEN, ord("*"), ord("^"))
RELATIONS = (COLON, SLASH, ord("<"), ord(">"), ord("="))
PATHS = (SLASH, ord("?"), ord("#"))
SMALL_AND_CAPITAL_S = (ord("s"), ord("S"))


@kernel
def word_hash(codes, first, last):
    """64-bit hash of some codes (FNV-1a, then mixed)."""
    value = SEED
    for i in range(first, last):
        value = (value ^ np.uint64(codes[i])) * FACTOR
    value = (value ^ (value >> HALF)) * MIX
    return value ^ (value >> HALF)


@kernel
def _flags(codes, bits, first, last):
    flags = 0
    for i in range(first, last):
        kind = bits[codes[i]]
        if kind & ALPHA:
            flags |= HAS_ALPHA
        if not kind & SYMBOL:
            flags |= HAS_NO_SYMBOL
    return flags


@kernel
def _special(codes, first, last, keys, parts):
    """Row of a run of characters among those that a table divides; -1 if it is not there.

    `keys` is a hash table with open addressing whose size is a power of two; 0 is empty.
    """
    if last - first > LONGEST_SPECIAL or last <= first:
        return -1
    value = word_hash(codes, first, last)
    mask = np.uint64(len(keys) - 1)
    slot = value & mask
    while keys[slot] != np.uint64(0):
        if keys[slot] == value and parts[slot, 0] == last - first:
            return np.int64(slot)
        slot = (slot + np.uint64(1)) & mask
    return -1


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
def _suffix(codes, bits, first, last, units, unit_lengths):
    """Length of what is divided from the end of a run of characters."""
    if first >= last:
        return 0
    code = codes[last - 1]
    kind = bits[code]
    if kind & SUFFIX:
        return 1
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
    return _unit(codes, bits, first, last, units, unit_lengths)


@kernel
def _unit(codes, bits, first, last, units, unit_lengths):
    """Length of a unit of measurement after a digit; units are ordered by falling length."""
    for row in range(len(unit_lengths)):
        start = last - unit_lengths[row]
        if start <= first or not bits[codes[start - 1]] & DIGIT:
            continue
        same = True
        for i in range(unit_lengths[row]):
            if codes[start + i] != units[row, i]:
                same = False
                break
        if same:
            return unit_lengths[row]
    return 0


@kernel
def _is_host_character(code, kind):
    return kind & (ALPHA | DIGIT) or code in (HYPHEN, UNDERSCORE) or code >= 0xA1


@kernel
def _is_address(codes, bits, first, last):
    """Whether a run of characters is a web or mail address, or a name with a dot like ``file.txt``."""
    begin = first
    for i in range(first + 2, last - 3):
        if codes[i] == COLON and codes[i + 1] == SLASH and codes[i + 2] == SLASH:
            begin = i + 3
            break
    for i in range(last - 1, begin, -1):
        if codes[i] == AT:
            return _is_host(codes, bits, i + 1, last) or _is_host(codes, bits, begin, last)
    return _is_host(codes, bits, begin, last)


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
    if code in OPERATORS and before & DIGIT:
        return 1 if after & DIGIT or codes[i + 1] == HYPHEN else 0
    if code in DASHES:
        return _dashes(codes, bits, i, last) if before & ALPHA else 0
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
def _put(codes, bits, first, last, starts, ends, hashes, flags, count):
    """Add a word; beyond the capacity words are only counted."""
    if count < len(starts):
        starts[count] = first
        ends[count] = last
        hashes[count] = word_hash(codes, first, last)
        flags[count] = _flags(codes, bits, first, last)
    return count + 1


@kernel
def _put_infixes(codes, bits, first, last, starts, ends, hashes, flags, count):
    """Add the words of a run of characters that has no prefix and no suffix."""
    begin, i = first, first
    while i < last:
        length = _infix(codes, bits, first, i, last)
        if length and i > first:
            if i > begin:
                count = _put(codes, bits, begin, i, starts, ends, hashes, flags, count)
            count = _put(codes, bits, i, i + length, starts, ends, hashes, flags, count)
            begin = i + length
        i += length if length else 1
    if begin < last:
        count = _put(codes, bits, begin, last, starts, ends, hashes, flags, count)
    return count


@kernel
def _put_special(codes, bits, first, row, parts, starts, ends, hashes, flags, count):
    """Add the words that a table gives for a run of characters."""
    for part in range(1, parts.shape[1]):
        length = parts[row, part]
        if length:
            count = _put(codes, bits, first, first + length, starts, ends, hashes, flags, count)
            first += length
    return count


@kernel
def _affixes(codes, bits, first, last, keys, parts, units, unit_lengths):
    """Lengths of the prefix and suffix to take off, and the row of the table for what is left; -1 if it has none."""
    before = _prefix(codes, bits, first, last)
    after = _suffix(codes, bits, first + before, last, units, unit_lengths)
    if before:
        special = _special(codes, first + before, last, keys, parts)
        if special >= 0:
            return before, 0, special
    if after:
        special = _special(codes, first, last - after, keys, parts)
        if special >= 0:
            return 0, after, special
    return before, after, _special(codes, first + before, last - after, keys, parts)


@kernel
def _put_run(codes, bits, first, last, keys, parts, units, unit_lengths, stack, starts, ends, hashes, flags, count):
    """Add the words of a run of characters without spaces: affixes, then what is between them."""
    depth = 0
    special = _special(codes, first, last, keys, parts)
    while special < 0:
        before, after, special = _affixes(codes, bits, first, last, keys, parts, units, unit_lengths)
        if not before and not after:
            break
        if before:
            count = _put(codes, bits, first, first + before, starts, ends, hashes, flags, count)
            first += before
        if after:
            stack[depth] = last
            depth += 1
            last -= after
    if special >= 0:
        count = _put_special(codes, bits, first, special, parts, starts, ends, hashes, flags, count)
    elif first < last and _is_address(codes, bits, first, last):
        count = _put(codes, bits, first, last, starts, ends, hashes, flags, count)
    elif first < last:
        count = _put_infixes(codes, bits, first, last, starts, ends, hashes, flags, count)
    while depth > 0:
        depth -= 1
        count = _put(codes, bits, last, stack[depth], starts, ends, hashes, flags, count)
        last = stack[depth]
    return count


@entry
def split_spacy_like(codes, offsets, bits, keys, parts, units, unit_lengths, firsts, starts, ends, hashes, flags):
    """Words of each document; returns their number, which may be more than the arrays hold.

    A run of nothing but letters is one word unless the table divides it.
    """
    count = 0
    stack = np.empty(64, np.int64)
    for document in range(len(offsets) - 1):
        firsts[document] = count
        position, end = offsets[document], offsets[document + 1]
        while position < end:
            if bits[codes[position]] & SPACE:
                position += 1
                continue
            first, letters = position, True
            while position < end and not bits[codes[position]] & SPACE:
                letters = letters and bits[codes[position]] & ALPHA != 0
                position += 1
            if letters and _special(codes, first, position, keys, parts) < 0:
                count = _put(codes, bits, first, position, starts, ends, hashes, flags, count)
                continue
            if position - first > len(stack):
                stack = np.empty(2 * (position - first), np.int64)
            count = _put_run(
                codes,
                bits,
                first,
                position,
                keys,
                parts,
                units,
                unit_lengths,
                stack,
                starts,
                ends,
                hashes,
                flags,
                count,
            )
    firsts[len(offsets) - 1] = count
    return count


@entry
def split_whitespace(codes, offsets, bits, firsts, starts, ends, hashes, flags):
    """Words between spaces of each document; returns their number, which may be more than the arrays hold."""
    count = 0
    for document in range(len(offsets) - 1):
        firsts[document] = count
        position, end = offsets[document], offsets[document + 1]
        while position < end:
            if bits[codes[position]] & SPACE:
                position += 1
                continue
            first = position
            while position < end and not bits[codes[position]] & SPACE:
                position += 1
            count = _put(codes, bits, first, position, starts, ends, hashes, flags, count)
    firsts[len(offsets) - 1] = count
    return count
