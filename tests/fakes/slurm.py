"""Slurm's commands as programs that note how they are called and answer what a test wants."""

from __future__ import annotations

import os
from pathlib import Path

NAMES = ("srun", "sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo")
BODY = """#!/bin/bash
printf '%s\\0' "$@" >"$FAKE_SLURM/{name}.argv"
echo "$*" >>"$FAKE_SLURM/{name}.calls"
env -0 >"$FAKE_SLURM/{name}.env"
[ ! -e "$FAKE_SLURM/{name}.sh" ] || . "$FAKE_SLURM/{name}.sh"
exit 0
"""


class FakeSlurm:
    """A folder of programs; `answers` says what each of them does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in NAMES:
            (folder / name).write_text(BODY.format(name=name))
            (folder / name).chmod(0o755)
        self.environ = {"PATH": f"{folder}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}

    def answers(self, **bodies: str) -> None:
        """What commands do, in bash."""
        for name, body in bodies.items():
            (self.folder / f"{name}.sh").write_text(body + "\n")

    def argv(self, name: str) -> list[str]:
        """The words of the last call."""
        return (self.folder / f"{name}.argv").read_bytes().decode().split("\0")[:-1]

    def env(self, name: str) -> dict[str, str]:
        """The variables of the last call."""
        lines = (self.folder / f"{name}.env").read_bytes().decode().split("\0")[:-1]
        return dict(line.split("=", 1) for line in lines)

    def calls(self, name: str) -> list[str]:
        """All calls, the words of each in one line."""
        file = self.folder / f"{name}.calls"
        return file.read_text().splitlines() if file.exists() else []

    def forget(self) -> None:
        """Forget the calls so far."""
        for file in self.folder.glob("*.calls"):
            file.unlink()
