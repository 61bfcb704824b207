"""Find in the log of a job why its step could not start the launchers."""

from __future__ import annotations

import os
import re
import stat
from typing import BinaryIO

from primus.errors import EXIT_FAILED

READ_BYTES = 1 << 20
"""A step that starts no launcher prints little."""
_ERROR = re.compile(r"^(?:slurmstepd-)?(?P<node>[\w.-]+): (?:error|fatal): (?P<text>.*\S)", re.MULTILINE)
"""A message of srun, or of slurmstepd with the node's name (log.c of Slurm)."""
_LAUNCHER_ERROR = re.compile(r"^primus-cli: (?!warning: |note: |running )(?P<text>.*\S)", re.MULTILINE)
"""An error of a launcher that could not record it, such as on a node without the run folder."""
_CONSEQUENCE = re.compile(
    r"(\S+: )?tasks? \S+: |Exited with|Terminat|spank: required plugin|Failed to invoke spank|pyxis: child \d+ failed|"
    r"pyxis: printing|pyxis: container exited too soon|\*\*\* "
)
"""Messages that follow from another one (srun(1); slurmstepd of 22.05; pyxis 0.24)."""


class StepLog:
    """What a step adds to the log of its job, which is this process's standard error.

    Args:
        descriptor: File descriptor of the log.
    """

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._begin = os.fstat(descriptor).st_size

    def find_first_error(self) -> str:
        """The first error of Slurm since this object was made, with its node; empty if there is none."""
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):  # such as a terminal
            return ""
        try:
            # Opened again by its number: the log itself is open for writing only.
            with open(f"/proc/self/fd/{self._descriptor}", "rb") as file:
                return read_first_error(file, self._begin)
        except OSError:
            return ""


def find_first_error(text: str) -> str:
    """The first error in the output of a step that explains the others; empty if there is none."""
    for match in _ERROR.finditer(text):
        if not _CONSEQUENCE.match(match["text"]):
            return match["text"] if match["node"] == "srun" else f"{match['text']} ({match['node']})"
    refused = _LAUNCHER_ERROR.search(text)
    return refused["text"] if refused else ""


def choose_exit_code(code: int, error: str) -> int:
    """Exit code of a step whose first error is known: srun gives the signal by which it ended the other tasks."""
    return EXIT_FAILED if error and code > 128 else code


def read_first_error(log: BinaryIO, begin: int = 0) -> str:
    """`find_first_error` in a log from byte `begin`."""
    log.seek(begin)
    return find_first_error(log.read(READ_BYTES).decode(errors="replace"))
