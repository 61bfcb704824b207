"""Secrets in free text, masked."""

from __future__ import annotations

import re

from primus.secret import MASK, is_secret

_ASSIGNED = re.compile(
    r"""(?P<name>[A-Za-z_][\w.-]*)(?P<is>["']?\s{0,2}[=:]\s{0,2})(?P<value>"[^"]*"|'[^']*'|[^\s"',;&)]+)"""
)
_OPTION = re.compile(r"(?P<name>--[A-Za-z][\w-]*)(?P<is>\s+)(?P<value>[^\s-]\S*)")
_URL = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
_SCHEME = re.compile(r"\b(Bearer|Basic|Token)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{8,}"
    r"|\bsk-[\w-]{16,}|\bAKIA[A-Z0-9]{12,}|\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*|\bnvapi-[\w-]{16,}"
)
"""Tokens by how their makers begin them: Hugging Face, GitHub, GitLab, Slack, OpenAI, AWS, JSON web tokens, NVIDIA."""
_PLAIN = frozenset(("none", "null", "true", "false", "nan", "error"))


def redacted(text: str) -> str:
    """`text` with every secret masked that its name or its form gives away."""
    if not text:
        return text
    text = _SCHEME.sub(rf"\1 {MASK}", text)
    text = _SHAPES.sub(MASK, text)
    text = _URL.sub(rf"\1:{MASK}@", text)
    return _OPTION.sub(_mask, _ASSIGNED.sub(_mask, text))


def _mask(match: re.Match[str]) -> str:
    value = match["value"].strip("\"'")
    is_harmless = value.lower() in _PLAIN or value.isdigit() or value == MASK
    if is_harmless or not is_secret(match["name"]):
        return match[0]
    return f"{match['name']}{match['is']}{MASK}"
