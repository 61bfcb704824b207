"""Hide secrets in what scripts print and hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from primus import secret

SHORTEST_SECRET = 4
"""Characters of the shortest value that is looked for in output; a shorter one would mask every digit."""


class Masks:
    """Known secret values, which no text may show."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._values: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.learn(environ)

    def learn(self, environ: Mapping[str, str]) -> None:
        """Take the secrets among `environ`, and the passwords in its addresses."""
        found = [value for name, value in environ.items() if secret.is_secret(name)]
        lines = [line.strip() for value in found for line in value.splitlines()]
        passwords = [match[1] for value in environ.values() for match in _URL_PASSWORD.finditer(value)]
        self._values |= {value for value in [*lines, *passwords] if len(value) >= SHORTEST_SECRET}
        longest_first = sorted(self._values, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def learn_words(self, words: Sequence[str]) -> None:
        """Take the values of secret options and assignments on a command line."""
        hidden = [word for word, shown in zip(words, secret.mask_words(words), strict=True) if word != shown]
        self.learn({f"SECRET_{number}": word.partition("=")[2] or word for number, word in enumerate(hidden)})

    def hides(self, text: str) -> bool:
        """Whether `text` holds a secret value."""
        return bool(self._pattern and self._pattern.search(text))

    def apply(self, text: str) -> str:
        """`text` without secrets: known values, assignments to secret names, passwords in addresses."""
        plain = self._pattern.sub(secret.MASK, text) if self._pattern else text
        return secret.masked("", _ASSIGNMENT.sub(_without_secret, plain))


def _without_secret(assignment: re.Match[str]) -> str:
    name, quote = assignment[1], assignment[2]
    return f"{name}={quote}{secret.MASK}" if secret.is_secret(name) else assignment[0]


_ASSIGNMENT = re.compile(r"""\b([A-Za-z_]\w*)=(["']?)[^\s"'$<;&|)][^\s"';&|)]*""")
"""A literal value that a line of a script sets: of `export A=b; C=$D` the first."""
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
