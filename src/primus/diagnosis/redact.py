"""Secrets in free text, masked."""

from __future__ import annotations

import re

from primus.secret import MASK, is_secret

_NAMED = re.compile(r"""(?P<option>--)?(?P<name>[A-Za-z_][\w.-]*)(?P<is>["']?\s{0,2}[=:]\s{0,2}|\s+)""")
_VALUE = re.compile(r"""(?:"[^"]*"?|'[^']*'?|[^\s"',;&)]+)""")
_URL = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
_USER = re.compile(r"(?<!\S)((?:-u|--user)[ =][^\s:]+):\S+|\b(login\s+)[0-9a-f]{32,}\b")
_SIGNED = re.compile(
    r"\b(X-Amz-Signature|X-Amz-Security-Token|sig|AccountKey|(?:Set-)?Cookie)(=|:\s*)[^\s&;]+(?:;[^;\s]+=\S+)*"
)
"""What is a secret below names that do not say so: signed addresses, keys of storage accounts, cookies."""
_SCHEME = re.compile(r"\b(Bearer|Basic|Token)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{8,}"
    r"|\bsk-[\w-]{16,}|\bA(?:KIA|SIA)[A-Z0-9]{12,}|\bnpm_[A-Za-z0-9]{16,}|\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*|\bnvapi-[\w-]{16,}"
)
"""Tokens by how their makers begin them: Hugging Face, GitHub, GitLab, Slack, OpenAI, AWS, JSON web tokens, NVIDIA."""
_PLAIN = frozenset(("none", "null", "true", "false", "nan", "error"))


def redacted(text: str) -> str:
    """`text` with every secret masked that its name or its form gives away."""
    if not text:
        return text
    text = _SCHEME.sub(rf"\1 {MASK}", text)
    text = _SHAPES.sub(MASK, text)
    text = _USER.sub(lambda found: f"{found[1]}:{MASK}" if found[1] else f"{found[2]}{MASK}", text)
    text = _SIGNED.sub(rf"\1\2{MASK}", text)
    text = _URL.sub(rf"\1:{MASK}@", text)
    return _without_named(text)


def _without_named(text: str) -> str:
    """`text` without the values of names and options that hold secrets."""
    parts: list[str] = []
    end = 0
    for found in _NAMED.finditer(text):
        if found.end() <= end or (found["is"].isspace() and not found["option"]) or not is_secret(found["name"]):
            continue
        value = _VALUE.match(text, found.end())
        if value is None or _is_harmless(value[0].strip("\"'")):
            continue
        parts += [text[end : found.end()], MASK]
        end = value.end()
    return "".join([*parts, text[end:]])


def _is_harmless(value: str) -> bool:
    return value.lower() in _PLAIN or value.isdigit() or value == MASK
