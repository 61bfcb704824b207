"""What a signature of a failure is: data, by which lines of logs are recognized."""

from __future__ import annotations

import functools
import re
from typing import Literal

from msgspec import Struct

from primus.runs.store import Action

Role = Literal["root", "cascade", "info"]
Strength = Literal["certain", "definite", "likely", "weak"]
SYSTEMS = (
    "any", "AMD", "NVIDIA", "RDMA", "EFA", "containers", "apptainer", "Slurm", "Kubernetes", "NFS", "torchrun", "gloo",
    "Megatron", "JAX", "Hugging Face", "primus",
)  # fmt: skip
UNCAUGHT_EXCEPTION = "uncaught-exception"
"""The signature without patterns: the diagnosis gives it to a Python exception that no other signature explains."""


class SignaturePattern(Struct, frozen=True):
    """Matches a line that contains `text` and, if there is one, matches `regex`."""

    text: str
    """Literal text, by which a log is searched."""
    regex: str = ""
    """Regular expression, searched in the line."""

    def matches(self, line: str) -> bool:
        """Whether `line` contains the text and matches the regular expression."""
        return self.text in line and (not self.regex or _compile_regex(self.regex).search(line) is not None)


@functools.cache
def _compile_regex(regex: str) -> re.Pattern[str]:
    return re.compile(regex)


class Signature(Struct, frozen=True, kw_only=True):
    """One known cause or effect of failures."""

    name: str
    cause: str
    """One sentence without a full stop."""
    fix: str
    """What to do: imperative, without a full stop."""
    role: Role = "root"
    """`root`: can be the first cause; `cascade`: follows another failure; `info`: is not a failure by itself."""
    action: Action = "retry"
    """What the launcher does about it, unless a policy says otherwise."""
    first_action: Action | None = None
    """What the launcher does the first time, if that differs."""
    strength: Strength = "definite"
    """`certain`: a device or the kernel reports it; `definite`: the line names the cause; `likely`: the line may also
    be harmless; `weak`: only how a process ended. Between roots the stronger one is the cause."""
    patterns: tuple[SignaturePattern, ...] = ()
    traceback: str = ""
    """Regular expression for lines of a traceback: explains an uncaught exception that no pattern matches, by the code
    that raised it."""
    headline: str = ""
    """Regular expression, case-insensitive: classifies an exception or error line that no pattern matches by its words.
    Messages name the subject first and the reason last: of several signatures, the one that matches last counts."""
    exit_codes: tuple[int, ...] = ()
    """Exit codes that mean it if no line says more; negative ones are numbers of signals."""
    count: int = 1
    """Lines that are needed."""
    is_kernel: bool = False
    """Whether it is a message of the kernel."""
    systems: tuple[str, ...] = ("any",)
    source: str = ""
    """Where it is publicly described."""

    def matches(self, line: str) -> bool:
        """Whether one of its patterns matches `line`."""
        return any(pattern.matches(line) for pattern in self.patterns)


class SignatureTable(Struct, frozen=True, eq=False):
    """All signatures: the package's and the user's."""

    signatures: tuple[Signature, ...]
    by_name: dict[str, Signature]
    by_exit_code: dict[int, Signature]
    problem: str = ""
    """Why the user's files are excluded."""
