"""The loop that drops lines as C4 did."""

from __future__ import annotations

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.compiler import compile_entry, compile_kernel
from primus.data.filter.cleaning.line_kernels import BREAK, NEWLINE, skip_break, strip_spaces

SPACE = characters.SPACE
DECIMAL = characters.DECIMAL
DOT = ord(".")
OPENING, CLOSING = ord("["), ord("]")
ENDINGS = (DOT, ord("?"), ord("!"), ord('"'), ord("'"))
"""What a line ends with; datatrove adds ' to the paper's four."""

KEPT, TOO_LONG_WORD, NO_ENDING, TOO_FEW_WORDS, JAVASCRIPT, POLICY = 0, 1, 2, 3, 4, 5
LOREM_IPSUM, CURLY_BRACKET = 6, 7
NUM_FATES = 8
"""What becomes of a line; the last two condemn its document."""

OTHER = 128
"""Stands for all characters beyond ASCII, and for what is not there."""
PLACES = 3
"""Characters of a phrase that are looked at together."""


@compile_kernel
def _matches_phrase(codes, first, last, phrase):
    """Whether a phrase (a fate, a length, then small letters) begins at a position, in any case."""
    if first + phrase[1] > last:
        return False
    for i in range(phrase[1]):
        code = codes[first + i]
        if 65 <= code <= 90:
            code += 32
        if code != phrase[i + 2]:
            return False
    return True


@compile_kernel
def _judge_content(codes, first, last, phrases, letters):
    """What becomes of a line for what it says: the fate of the first phrase in the table that is in it.

    `letters` has for each of the first places of a phrase, and each character, a bit for each phrase that has it there.
    """
    found = len(phrases)
    for i in range(first, last):
        beginning = letters[0, min(codes[i], OTHER)]
        if not beginning:
            continue
        for place in range(1, len(letters)):
            beginning &= letters[place, min(codes[i + place], OTHER) if i + place < last else OTHER]
        if not beginning:
            continue
        for row in range(found):
            if beginning >> row & 1 and _matches_phrase(codes, i, last, phrases[row]):
                found = row
                break
    return phrases[found, 0] if found < len(phrases) else KEPT


@compile_kernel
def _is_citation(codes, bits, first, last, citations):
    """Length of a citation mark like ``[12]``, ``[edit]`` or ``[citation needed]``; 0 if there is none."""
    end = first + 1
    while end < last and bits[codes[end]] & DECIMAL:
        end += 1
    if end < last and codes[end] == CLOSING:
        return end + 1 - first
    for row in range(len(citations)):
        same = first + citations[row, 0] <= last
        for i in range(citations[row, 0]):
            same = same and codes[first + i] == citations[row, i + 1]
        if same:
            return citations[row, 0]
    return 0


@compile_kernel
def _copy_without_citations(codes, bits, first, last, citations, remove_citations, written, count):
    """Copy a line without its citation marks; returns the new end of what is written."""
    i = first
    while i < last:
        if remove_citations and codes[i] == OPENING:
            length = _is_citation(codes, bits, i, last, citations)
            if length:
                i += length
                continue
        written[count] = codes[i]
        count += 1
        i += 1
    return count


@compile_kernel
def _has_good_ending(codes, first, last):
    """Whether a line ends in a mark that ends a sentence, and not in three dots."""
    if first == last or codes[last - 1] not in ENDINGS:
        return False
    return not (last - first >= 3 and codes[last - 1] == DOT and codes[last - 2] == DOT and codes[last - 3] == DOT)


@compile_kernel
def _measure_line(codes, bits, first, last):
    """End of a line, number of its words between spaces, and the length of the longest."""
    count = longest = 0
    while first < last:
        kind = bits[codes[first]]
        if kind & BREAK:
            break
        if kind & SPACE:
            first += 1
            continue
        begin = first
        while first < last and not bits[codes[first]] & SPACE:
            first += 1
        count += 1
        longest = max(longest, first - begin)
    return first, count, longest


@compile_entry
def drop_lines(
    codes, offsets, alive, bits, limits, switches, citations, phrases, letters, written, written_offsets, fates,
):  # fmt: skip
    """Write the lines of each document that C4 keeps.

    Args:
        codes, offsets, alive, bits: The documents.
        limits: Words that a line has at least, and characters that a word has at most; -1 for no limit.
        switches: Whether to remove citation marks, and to want an ending.
        citations: Citation marks without a number: rows of a length, then codes.
        phrases: What condemns a line or document: rows of what becomes of it, a length, then codes; the first counts.
        letters: Which phrases have which characters; see `_content`. int64[PLACES, OTHER + 1].
        written, written_offsets: Receive the documents; room for as many codes as there are and one more each.
        fates: Receives how many lines were kept, or dropped for what reason, int64[D, NUM_FATES]; nothing is read
            of a document behind a line that condemns it.
    """
    count = 0
    for document in range(len(offsets) - 1):
        written_offsets[document] = count
        first, last = offsets[document], offsets[document + 1]
        if not alive[document]:
            continue
        begin, fate = count, KEPT
        while first < last and fate != LOREM_IPSUM and fate != CURLY_BRACKET:
            end, num_words, longest = _measure_line(codes, bits, first, last)
            line, line_end = strip_spaces(codes, bits, first, end)
            start = count + 1 if count > begin else count
            written_end = _copy_without_citations(codes, bits, line, line_end, citations, switches[0], written, start)
            fate = _judge_shape(num_words, longest, written, start, written_end, limits, switches[1])
            if fate == KEPT:
                fate = _judge_content(written, start, written_end, phrases, letters)
            fates[document, fate] += 1
            if fate == KEPT:
                if start > begin:
                    written[start - 1] = NEWLINE
                count = written_end
            first = skip_break(codes, end, last)
        count = _strip_written(written, bits, begin, count)
    written_offsets[len(offsets) - 1] = count
    return count


@compile_kernel
def _judge_shape(num_words, longest, written, start, written_end, limits, wants_ending):
    """What becomes of a line for its words and its end."""
    if limits[1] >= 0 and longest > limits[1]:
        return TOO_LONG_WORD
    if wants_ending and not _has_good_ending(written, start, written_end):
        return NO_ENDING
    return TOO_FEW_WORDS if num_words < limits[0] else KEPT


@compile_kernel
def _strip_written(written, bits, begin, count):
    """End of a written document whose spaces at both ends are removed."""
    first, last = strip_spaces(written, bits, begin, count)
    if first > begin:
        for i in range(first, last):
            written[begin + i - first] = written[i]
    return begin + last - first
