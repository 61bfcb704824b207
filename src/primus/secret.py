"""Secrets are known by name and never shown."""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "<secret>"
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)(API)?KEY(_|$)|(^|_)(DSN|AUTH|PAT)(_|$)")
_HARMLESS = re.compile(r"TOKENIZ\w*?(?=_|$)|TOKENS|^JSON_KEY$|FIM_[A-Z]+_TOKEN$|\w*_FILE$")
_ASSIGNMENT = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name holds a secret: *TOKEN*, *SECRET*, *PASSWORD*, *_KEY, ..."""
    plain = name.lstrip("-").upper().replace("-", "_").replace(".", "_")
    return bool(_SECRET.search(_HARMLESS.sub("", plain)))


def masked(name: str, value: str) -> str:
    """`value` of the variable `name`, or the mask; an assignment's value and passwords in URLs too, under any name."""
    if is_secret(name):
        return MASK
    inner = _ASSIGNMENT.fullmatch(value)
    if inner and is_secret(inner[1]):
        return f"{inner[1]}={MASK}"
    return _URL_PASSWORD.sub(rf"\1:{MASK}@", value)


def mask_words(words: Iterable[str]) -> list[str]:
    """A command line with the values of secret options and assignments masked."""
    shown: list[str] = []
    mask_next = False
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if mask_next and not word.startswith("--"):
            shown.append(MASK)
        elif match:
            shown.append(f"{match[1]}={masked(match[1], match[2])}")
        else:
            shown.append(_URL_PASSWORD.sub(rf"\1:{MASK}@", word))
        mask_next = word.startswith("--") and "=" not in word and is_secret(word)
    return shown
