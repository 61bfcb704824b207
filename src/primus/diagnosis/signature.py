"""What a signature of a failure is: data, by which lines of logs are recognized."""

from __future__ import annotations

import functools
import re
from typing import Literal

from msgspec import Struct

from primus.runs.store import Action

Role = Literal["root", "symptom", "cascade", "info"]
Strength = Literal["certain", "definite", "likely", "weak"]
Layer = Literal["", "system", "operation"]
SYSTEMS = (
    "any", "AMD", "NVIDIA", "RDMA", "EFA", "containers", "apptainer", "Slurm", "Kubernetes", "NFS", "torchrun", "gloo",
    "Megatron", "JAX", "Hugging Face", "primus",
)  # fmt: skip
REPORTERS = {"containers", "apptainer", "Slurm", "Kubernetes", "torchrun", "primus"}
"""Systems that report how processes ended."""
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
        return self.find(line) >= 0

    def find(self, line: str) -> int:
        """Character at which the words of the pattern begin in `line`; -1 if it does not match."""
        at = line.find(self.text)
        if at < 0 or not self.regex:
            return at
        found = compile_regex(self.regex).search(line)
        return -1 if found is None else found.start() if found[0] else at


@functools.cache
def compile_regex(regex: str) -> re.Pattern[str]:
    """The compiled expression, compiled once."""
    return re.compile(regex)


class Signature(Struct, frozen=True, kw_only=True):
    """One known cause or effect of failures."""

    name: str
    cause: str
    """One sentence without a full stop."""
    fix: str
    """What to do: imperative, without a full stop."""
    role: Role = "root"
    """`root`: can be the first cause; `symptom`: is the cause if no root and no exception explains it; `cascade`:
    follows another failure; `info`: is not a failure by itself."""
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
    facts: tuple[str, ...] = ()
    """Regular expressions whose named groups are told with the cause: `connect to (?P<address>[^)]+)`."""
    layer: Layer = ""
    """`system`: an error of the operating system; `operation`: what a program tried. An error of the system beside an
    operation is the reason why it failed."""
    follows: tuple[str, ...] = ()
    """Signatures after which this one is a consequence, if the same rank or an unknown one shows them."""
    by_victim: bool | None = None
    """Whether the rank that writes the line is a victim, so that it did not fail first; default: for a cascade."""
    blames: str = ""
    """Regular expression whose groups are the host that the line blames, in place of the one that writes it."""
    is_kernel: bool = False
    """Whether it is a message of the kernel."""
    systems: tuple[str, ...] = ("any",)
    source: str = ""
    """Where it is publicly described."""

    @property
    def blames_writer(self) -> bool:
        """Whether the rank that writes the line may have failed first."""
        return self.role != "cascade" if self.by_victim is None else not self.by_victim

    @property
    def shows_end(self) -> bool:
        """Whether its lines are reports of the end of a process, whatever they look like."""
        return self.is_kernel or self.strength in ("certain", "weak") or not REPORTERS.isdisjoint(self.systems)

    def find_blamed_host(self, line: str) -> str | None:
        """The host that `line` blames, if it is another one than the writer's."""
        found = compile_regex(self.blames).search(line) if self.blames else None
        return next(group for group in found.groups() if group) if found else None

    def matches(self, line: str) -> bool:
        """Whether one of its patterns matches `line`."""
        return any(pattern.matches(line) for pattern in self.patterns)

    def find_words(self, line: str) -> int:
        """Character at which the last of its patterns in `line` begins; -1 if none matches."""
        return max((pattern.find(line) for pattern in self.patterns), default=-1)


class SignatureTable(Struct, frozen=True, eq=False):
    """All signatures: the package's and the user's."""

    signatures: tuple[Signature, ...]
    by_name: dict[str, Signature]
    by_exit_code: dict[int, Signature]
    problem: str = ""
    """Why the user's files are excluded."""
