"""Any value goes through every chain of runtimes as it is: in variables, arguments and paths."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fakes import cli, clients

NASTY = "a b\t'q\" $(touch owned) `touch owned` ${HOME} $$ \\ * ? [x] ~ # ; & | < > ! %j {b,c} é 日本 -- =,"
LINES = "first\nsecond 'line'\n$(touch owned)\n"
LONG = "x=,' \"" * 17_000
FOLDER = "a b'c\"d $(touch owned) `é` #%j"
CHAINS = {
    "docker": ("container", "--engine", "docker", "--image", "x:1"),
    "podman": ("container", "--engine", "podman", "--image", "x:1"),
    "apptainer": ("container", "--engine", "apptainer", "--image", "./x.sif"),
    "srun": ("slurm", "srun", "-N", "1"),
    "sbatch": ("slurm", "sbatch", "-N", "1", "--job-name", NASTY),
    "sbatch, docker": ("slurm", "sbatch", "-N", "1", "--", "container", "--engine", "docker", "--image", "x:1"),
    "ssh": ("ssh", "--hosts", "localhost"),
    "ssh, podman": ("ssh", "--hosts", "localhost", "--", "container", "--engine", "podman", "--image", "x:1"),
}


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    clients.install(tmp_path / "bin")
    (tmp_path / "records").mkdir()
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "x.sif").touch()
    return folder


@pytest.mark.parametrize("value", [NASTY, LINES, LONG, ""], ids=["nasty", "lines", "100 kB", "empty"])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_value_arrives_as_it_is(chain: tuple[str, ...], value: str, workplace: Path) -> None:
    env = {
        "PATH": f"{workplace.parent / 'bin'}:{os.environ['PATH']}",
        "RECORDS": str(workplace.parent / "records"),
        "HOME": str(workplace.parent),
        "XDG_STATE_HOME": str(workplace.parent / "state"),
    }
    said = f"--say={NASTY if value == LONG else value}"
    words = (*chain, "--", "direct", "--env", f"HOSTILE={value}", "--", "mirror", "seen.json", said)
    done = cli.run(*words, cwd=workplace, timeout_s=60, **env)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    seen = json.loads((workplace / "seen.json").read_text())
    assert seen["variables"]["HOSTILE"] == value
    assert f"--say={seen['said']}" == said
    assert seen["folder"] == str(workplace)
    assert not list(workplace.parent.rglob("owned")), "nothing of it was executed"
