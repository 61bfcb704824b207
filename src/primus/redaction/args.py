"""Variables and command lines without the values of secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.redaction.fingerprint import fingerprint_key
from primus.redaction.forms import MASK
from primus.redaction.harmless import is_harmless_variable
from primus.redaction.known import redact, redact_log_text
from primus.redaction.names import is_secret_name

_ASSIGNMENT = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def redact_value(name: str, value: str) -> str:
    """`value` of the variable, option or key `name`, or the mask; other values without their secret parts."""
    if is_secret_name(name):
        return MASK
    inner = _ASSIGNMENT.fullmatch(value)
    if inner and is_secret_name(inner[1]):
        return f"{inner[1]}={MASK}"
    return redact_log_text(value, assigned_only=True)


def hide_inherited_value(name: str, value: str) -> str:
    """`value` of a variable that the user's shell happens to have: as `redact_value` if it is harmless, the mask for
    the name of a secret, else a fingerprint."""
    if is_secret_name(name) or is_harmless_variable(name, value):
        return redact_value(name, value)
    return fingerprint_key.compute(name, value)


def redact_args(args: Iterable[str]) -> list[str]:
    """A command line without the values of secret options and assignments, and without secrets in any other value."""
    shown: list[str] = []
    is_next = False
    for arg in args:
        match = _ASSIGNMENT.fullmatch(arg)
        if is_next and not arg.startswith("--"):
            shown.append(MASK)
        elif match:
            shown.append(f"{match[1]}={redact_value(match[1], match[2])}")
        else:
            shown.append(redact(arg))
        is_next = arg.startswith("--") and "=" not in arg and is_secret_name(arg)
    return shown
