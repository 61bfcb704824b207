"""Kernel that drops lines as in C4."""

from __future__ import annotations

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.compiler import compile_entry, compile_kernel
from primus.data.filter.cleaning.line_kernels import BREAK, NEWLINE, skip_break, strip_spaces

SPACE = characters.SPACE
DECIMAL = characters.DECIMAL
DOT = ord(".")
OPENING, CLOSING = ord("["), ord("]")
ENDINGS = (DOT, ord("?"), ord("!"), ord('"'), ord("'"))
"""Valid last characters of a line; datatrove adds ' to the paper's four."""

KEPT, TOO_LONG_WORD, NO_ENDING, TOO_FEW_WORDS, JAVASCRIPT, POLICY = 0, 1, 2, 3, 4, 5
LOREM_IPSUM, CURLY_BRACKET = 6, 7
NUM_FATES = 8
"""Results for a line; each of the last two removes its document."""

OTHER = 128
"""Column of the letter table for all characters beyond ASCII, and for positions past the end of the line."""
PLACES = 3
"""First characters of a phrase that the letter table covers."""


@compile_kernel
def _matches_phrase(codes, first, last, phrase):
    """Whether a phrase (a result, a length, then lower-case letters) begins at a position; case is ignored."""
    if first + phrase[1] > last:
        return False
    for i in range(phrase[1]):
        code = codes[first + i]
        # 65 to 90 are A to Z. The phrases are ASCII, so that no other letters need case folding.
        if 65 <= code <= 90:
            code += 32
        if code != phrase[i + 2]:
            return False
    return True


@compile_kernel
def _judge_content(codes, first, last, phrases, letters):
    """Result for the content of a line: that of the first phrase in the table that the line contains.

    `letters` maps a position in a phrase and a character to a bit set of the phrases with this character there.
    """
    # `found` is the best row so far and bounds the search: only rows above it are compared, so that the order of the
    # table decides, not the position in the line.
    found = len(phrases)
    for i in range(first, last):
        # One look-up rejects most positions: no phrase begins with their character.
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
    """Copy a line without its citation marks; returns the end of the written codes."""
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
    """Whether a line ends with a valid character, and not with three dots."""
    if first == last or codes[last - 1] not in ENDINGS:
        return False
    return not (last - first >= 3 and codes[last - 1] == DOT and codes[last - 2] == DOT and codes[last - 3] == DOT)


@compile_kernel
def _measure_line(codes, bits, first, last):
    """End of a line, number of its words between spaces, and length of the longest word."""
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
    """Write the lines of each document that the C4 rule keeps.

    Args:
        codes, offsets, alive, bits: The documents.
        limits: Minimum words of a line and maximum characters of a word; -1 for no limit.
        switches: Whether to remove citation marks, and whether a line needs a valid last character.
        citations: Citation marks without a number: rows of a length, then codes.
        phrases: Rows of a result, a length, then codes; the first phrase that occurs in a line decides.
        letters: Which phrases have which characters; see `_judge_content`. int64[PLACES, OTHER + 1].
        written, written_offsets: Receive the documents; `written` has room for all codes and one more per document.
        fates: Receives the number of lines by result, int64[D, NUM_FATES]; lines after one that removes its document
            are not read.
    """
    # A kept line is written after the one before it, with room for a newline. A dropped line leaves `count` as it is,
    # so that the next line overwrites it.
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
    """Result for the words and the last character of a line."""
    if limits[1] >= 0 and longest > limits[1]:
        return TOO_LONG_WORD
    if wants_ending and not _has_good_ending(written, start, written_end):
        return NO_ENDING
    return TOO_FEW_WORDS if num_words < limits[0] else KEPT


@compile_kernel
def _strip_written(written, bits, begin, count):
    """Remove spaces at both ends of a written document; returns its end."""
    first, last = strip_spaces(written, bits, begin, count)
    if first > begin:
        # The copy runs upwards in place: a source position is never before its target.
        for i in range(first, last):
            written[begin + i - first] = written[i]
    return begin + last - first
