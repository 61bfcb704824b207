"""What a signature of a failure is: data, by which lines of logs are recognised."""

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
    "Megatron", "Hugging Face", "primus",
)  # fmt: skip


class SignaturePattern(Struct, frozen=True):
    """A line shows it that holds `text` and, where there is one, matches `pattern`."""

    text: str
    """Literal words, by which a log is searched."""
    pattern: str = ""
    """Regular expression, searched in the line."""

    def is_in(self, line: str) -> bool:
        """Whether `line` shows it."""
        return self.text in line and (not self.pattern or _compile_pattern(self.pattern).search(line) is not None)


@functools.cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


class Signature(Struct, frozen=True, kw_only=True):
    """One known cause or effect of failures."""

    name: str
    role: Role
    """`root`: can be the first cause; `cascade`: follows another failure; `info`: is no failure by itself."""
    action: Action = "retry"
    """What a policy does about it that says nothing else."""
    first_action: Action | None = None
    """What is done the first time, where that differs."""
    strength: Strength = "definite"
    """`certain`: a device or the kernel reports it; `definite`: the line names the cause; `likely`: it may also be
    harmless; `weak`: only how a process ended. Between roots the stronger counts."""
    signs: tuple[SignaturePattern, ...] = ()
    exit_codes: tuple[int, ...] = ()
    """Exit codes that mean it, where no line says more; negative ones are numbers of signals."""
    count: int = 1
    """Lines that are needed."""
    is_kernel: bool = False
    """Whether it stands in the kernel's log."""
    systems: tuple[str, ...] = ("any",)
    cause: str
    """In one sentence, without a full stop."""
    fix: str
    """What to do, in one sentence, without a full stop."""
    source: str
    """Where it is publicly described."""

    def is_shown_by(self, line: str) -> bool:
        """Whether one of its signs is in `line`."""
        return any(sign.is_in(line) for sign in self.signs)


def signs(*texts: str) -> tuple[SignaturePattern, ...]:
    """Signs that are literal words alone."""
    return tuple(SignaturePattern(text) for text in texts)
