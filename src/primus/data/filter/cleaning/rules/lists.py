"""Rules with lists from files: words that a text, or a URL, must not have."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from primus.data.filter.cleaning.block import DocumentBlock
from primus.data.filter.cleaning.rules.rule import Rule
from primus.errors import UsageError


class BadWords(Rule, frozen=True, kw_only=True, tag="bad_words"):
    """Removes texts with a word or phrase of a list that is not part of a longer word. Case is ignored.

    C4 used the "List of Dirty, Naughty, Obscene or Otherwise Bad Words" (github.com/LDNOOBW).
    """

    file: str
    """File with one entry per line, UTF-8."""

    def start(self) -> None:
        """Read the list once.

        Raises:
            UsageError: The list cannot be read or is empty.
        """
        _build_pattern(self.file)

    def identity(self) -> dict[str, object]:
        """The list."""
        return {"entries": _hash_entries(_read_entries(self.file))}

    def apply(self, block: DocumentBlock) -> None:
        """Remove by the list."""
        pattern = _build_pattern(self.file)

        def judge(document: int) -> tuple[str, str, None] | None:
            found = pattern.search(block.texts[document].lower())
            return ("word", found[0], None) if found else None

        block.remove_where(self.name, judge)


class Urls(Rule, frozen=True, kw_only=True, tag="urls"):
    """Removes records by their URL: listed domains with their subdomains, listed addresses, words in an address."""

    field: str = "url"
    """Field of the record; a record without it is kept."""
    domains: str | None = None
    """File of domains, one per line."""
    addresses: str | None = None
    """File of whole URLs."""
    words: str | None = None
    """File of words. Characters other than letters and digits delimit the words of a URL."""

    def start(self) -> None:
        """Read the lists once.

        Raises:
            UsageError: No list is given, or a list cannot be read.
        """
        if not any(self._list_files()):
            raise UsageError("rule urls has no list", "give domains, addresses or words: the path of a file")
        for file in filter(None, self._list_files()):
            _read_entries(file)

    def identity(self) -> dict[str, object]:
        """The lists."""
        # The content counts, not the path: the same lists in another folder give the same result.
        return {"entries": [_hash_entries(_read_entries(file)) if file else "" for file in self._list_files()]}

    def apply(self, block: DocumentBlock) -> None:
        """Remove by the lists."""
        domains, addresses, words = (_read_entries(file) if file else frozenset[str]() for file in self._list_files())

        def judge(document: int) -> tuple[str, str, None] | None:
            fields = block.fields[document] if block.fields else None
            url = (fields or {}).get(self.field)
            if not isinstance(url, str):
                return None
            if domain := _find_listed_domain(_parse_host(url), domains):
                return "domain", domain, None
            if url.lower() in addresses:
                return "address", url, None
            found = words.intersection(re.split(r"[^a-z0-9]+", url.lower())) if words else None
            return ("word", min(found), None) if found else None

        block.remove_where(self.name, judge)

    def _list_files(self) -> tuple[str | None, str | None, str | None]:
        return self.domains, self.addresses, self.words


def _parse_host(url: str) -> str:
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return ""


def _find_listed_domain(host: str, domains: frozenset[str]) -> str:
    """The listed domain of a host or of its parent domains; empty if there is none."""
    while host and host not in domains:
        _, _, host = host.partition(".")
    return host


@functools.cache
def _read_entries(file: str) -> frozenset[str]:
    """Lines of a file in lower case, without comments."""
    try:
        lines = Path(os.path.expanduser(file)).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"{file}: cannot be read: {reason}", "give the path of a text file") from None
    found = frozenset(line.strip().lower() for line in lines if line.strip() and not line.startswith("#"))
    if not found:
        raise UsageError(f"{file}: an empty list", "give a file with one entry a line")
    return found


@functools.cache
def _build_pattern(file: str) -> re.Pattern[str]:
    # Longer entries first: a regular expression takes the first alternative that matches, and the report names it.
    entries = "|".join(
        re.escape(entry) for entry in sorted(_read_entries(file), key=lambda entry: (-len(entry), entry))
    )
    return re.compile(rf"(?<!\w)(?:{entries})(?!\w)")


def _hash_entries(entries: frozenset[str]) -> str:
    return hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest()
