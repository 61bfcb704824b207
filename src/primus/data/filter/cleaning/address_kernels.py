"""Kernels that recognize web and mail addresses. `codes` are code points, uint32[N]; positions are indices into it."""

from __future__ import annotations

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.compiler import compile_kernel

ALPHA = characters.ALPHA
LOWER = characters.LOWER
DIGIT = characters.DIGIT
DECIMAL = characters.DECIMAL

HYPHEN, DOT, UNDERSCORE = ord("-"), ord("."), ord("_")
COLON, SLASH, AT = ord(":"), ord("/"), ord("@")
IN_SCHEME = (ord("+"), HYPHEN, DOT, UNDERSCORE)
PATHS = (SLASH, ord("?"), ord("#"))


@compile_kernel
def is_address(codes, bits, first, last):
    """Whether a run of characters is a web or mail address, or a name with a dot like ``file.txt``."""
    begin = _skip_scheme(codes, bits, first, last)
    # An @ belongs to a mail address or to the path of a URL (example.com/@name), so both readings are tried.
    for i in range(last - 1, begin, -1):
        if codes[i] == AT:
            return _is_host(codes, bits, i + 1, last) or _is_host(codes, bits, begin, last)
    return _is_host(codes, bits, begin, last)


@compile_kernel
def _skip_scheme(codes, bits, first, last):
    """Position after a scheme such as ``https://``; `first` if there is none."""
    i = first
    while i < last and (bits[codes[i]] & (ALPHA | DECIMAL) or codes[i] in IN_SCHEME):
        i += 1
    # As in spaCy's URL pattern, a scheme has at least two characters.
    if i - first >= 2 and i + 2 < last and codes[i] == COLON and codes[i + 1] == SLASH and codes[i + 2] == SLASH:
        return i + 3
    return first


@compile_kernel
def _is_host(codes, bits, first, last):
    """Whether the characters are a host name or an IPv4 address, with an optional port and path."""
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
        # Only digits and dots: an IPv4 address has exactly three dots.
        if num_labels != 3:
            return False
    else:
        # A top-level domain has 2 to 63 lower-case letters, so that an abbreviation such as U.S is not an address.
        if end - label < 2 or end - label > 63:
            return False
        for i in range(label, end):
            if not bits[codes[i]] & LOWER:
                return False
    return _is_path(codes, bits, end, last)


@compile_kernel
def _is_host_character(code, kind):
    # Every code from U+00A1 is accepted, for internationalized names.
    return kind & (ALPHA | DIGIT) or code in (HYPHEN, UNDERSCORE) or code >= 0xA1


@compile_kernel
def _is_label(codes, bits, first, last):
    """Whether the characters between two dots are a valid label of a host name."""
    if first >= last or last - first > 64:
        return False
    return (
        codes[first] != HYPHEN
        and codes[first] != ord("_")
        and codes[last - 1] != HYPHEN
        and codes[last - 1] != ord("_")
    )


@compile_kernel
def _is_path(codes, bits, first, last):
    """Whether the rest of an address is a port, a path, both or nothing."""
    if first < last and codes[first] == COLON:
        first += 1
        begin = first
        while first < last and bits[codes[first]] & DIGIT:
            first += 1
        # A port has 2 to 5 digits.
        if first - begin < 2 or first - begin > 5:
            return False
    return first == last or codes[first] in PATHS
