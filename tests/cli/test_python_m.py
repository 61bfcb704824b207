"""`python -m primus` is the same command as `primus-cli`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fakes import cli


def run_module(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "primus", *words]
    return subprocess.run(command, cwd=cwd, env=cli.environment(), capture_output=True, text=True, timeout=60)


def test_python_m_primus_prints_what_primus_cli_prints(tmp_path: Path) -> None:
    for words in (("--help",), ("--version",), ("direct", "--", "config", "init", "tiny"), ("direct", "--", "runz")):
        module, command = run_module(*words, cwd=tmp_path), cli.run(*words, cwd=tmp_path)
        assert (module.returncode, module.stdout, module.stderr) == (command.returncode, command.stdout, command.stderr)
