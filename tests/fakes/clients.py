"""Fake clients of containers, schedulers and other hosts: executables that note their words and then do what is inside.

Each of them writes its arguments to a file of $RECORDS, and starts the `primus-cli` that stands in them here and now.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NAMES = ("docker", "podman", "apptainer", "srun", "sbatch", "scontrol", "squeue", "sacct", "sinfo", "scancel", "ssh")

PROGRAM = """\
#!{python}
import json, os, subprocess, sys

name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.path.join(os.environ["RECORDS"], f"{{name}}.{{os.getpid()}}.json"), "w") as file:
    json.dump(words, file)
job = {{"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_NODEID": "0"}}
step = {{**job, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1"}}
inside = next((at for at, word in enumerate(words) if word.endswith("/primus-cli")), None)
if name == "sbatch":
    if "--test-only" not in words:
        subprocess.run(["bash", words[-1]], env={{**os.environ, **job}}, stdin=subprocess.DEVNULL, check=False)
    print(7)
elif name == "scontrol":
    print("n1")
elif name == "ssh":
    at = next(at for at, word in enumerate(words) if word in ("localhost", "n1"))
    remote = " ".join(words[at + 1 :])
    clean = {{key: os.environ[key] for key in ("PATH", "HOME", "RECORDS", *{kept!r}) if key in os.environ}}
    sys.exit(subprocess.run(["sh", "-c", remote], env=clean, check=False).returncode)
elif inside is not None:
    env = {{**os.environ, **(step if name == "srun" else {{}})}}
    os.execve({python!r}, [{python!r}, "-m", "primus.cli.main", *words[inside + 1 :]], env)
"""


def install(folder: Path, kept: tuple[str, ...] = ("PYTHONPATH", "PRIMUS_PLUGINS")) -> None:
    """Put the clients into `folder`, for the front of PATH.

    Args:
        folder: Made where it is not there.
        kept: Variables that a shell on another host has of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        file = folder / name
        file.write_text(PROGRAM.format(python=sys.executable, kept=kept))
        file.chmod(0o755)


def recorded(folder: Path, name: str) -> list[list[str]]:
    """Arguments of each call of the client `name`."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}.*.json"))]
