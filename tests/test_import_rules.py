"""Imports keep to the contracts, and the control plane starts without heavy packages."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from primus import registry

REPOSITORY = Path(__file__).parent.parent

HEAVY = {
    "torch",
    "numpy",
    "jax",
    "megatron",
    "torchtitan",
    "transformers",
    "tokenizers",
    "pyarrow",
    "tensorboard",
    "rich",
}
"""Packages that cost tens of milliseconds to seconds to import, or that a login node does not have."""

REPORT = (
    "import atexit, json, sys; atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=open({!r}, 'w')))"
)
LIMIT_S = 280.0
"""For a process that takes seconds of a processor, on a machine that is busy with other tests."""


def lint_imports(source: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    command = [sys.executable, "-c", program, "--no-cache", "--config", str(REPOSITORY / ".importlinter")]
    env = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def test_imports_keep_to_the_contracts() -> None:
    checked = lint_imports(REPOSITORY / "src")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("config/load.py", "from primus.launch import prepare", "Imports point down BROKEN"),
        ("worker.py", "from primus.frameworks import native", "Plug-ins are reached only through the registry BROKEN"),
        ("plan.py", "import numpy", "The control plane reaches no tensor library BROKEN"),
        (
            "launch/variables.py",
            "from primus.launch import inherited_variables",
            "No modules import each other in a circle BROKEN",
        ),
        ("unplaced.py", "import os", "The following modules are not listed as layers"),
    ],
)
def test_a_wrong_import_breaks_its_contract(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    shutil.copytree(REPOSITORY / "src/primus", tmp_path / "primus", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "primus" / file).open("a") as module:
        module.write(f"\n{line}\n")
    checked = lint_imports(tmp_path)
    assert checked.returncode != 0
    assert complaint in checked.stdout


def test_every_kind_of_plug_in_is_protected() -> None:
    config = configparser.ConfigParser()
    config.read(REPOSITORY / ".importlinter")
    protected = set(config["importlinter:contract:plug-ins"]["protected_modules"].split())
    code = {kind: folder for kind, folder in registry.FOLDERS.items() if kind not in registry.DATA_KINDS}
    assert protected == {f"primus.{folder.replace('/', '.')}.*" for folder in code.values()}


def modules_after(words: list[str], tmp_path: Path) -> set[str]:
    """Names of all modules that the command has imported when it ends."""
    report = tmp_path / "modules.json"
    program = (
        f"{REPORT.format(str(report))}\nsys.argv[0] = 'primus-cli'\nfrom primus.cli.main import main\nsys.exit(main())"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return set(json.loads(report.read_text()))


EXPERIMENT = ["--config", "examples/quickstart.yaml"]


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["direct", "--help"],
        ["direct", "--", "train", "pretrain", "--help"],
        ["direct", "--", "config", "check", *EXPERIMENT],
        ["direct", "--", "config", "show", *EXPERIMENT],
        ["direct", "--", "config", "schema"],
        ["direct", "--", "config", "init", "llama3.1_8B"],
        ["direct", "--", "runs", "list"],
        ["engines"],
        ["--dry-run", "direct", "--", "train", "pretrain", *EXPERIMENT],
        ["--dry-run", "direct", "--nproc", "2", "--", "train", "pretrain", *EXPERIMENT, "--train_iters", "20"],
        ["--dry-run", "direct", "--", "data", "prepare", "--input", "docs", "--output", "data/x"],
    ],
    ids=" ".join,
)
def test_the_control_plane_imports_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    heavy = HEAVY & {name.partition(".")[0] for name in modules_after(words, tmp_path)}
    assert not heavy


@pytest.mark.parametrize("runtime", [["direct", "--nproc", "2"], ["slurm", "srun", "-N", "2"]], ids=" ".join)
def test_a_dry_run_loads_nothing_that_only_a_launch_needs(runtime: list[str], tmp_path: Path) -> None:
    words = ["--dry-run", *runtime, "--", "train", "pretrain", *EXPERIMENT]
    assert not {"subprocess", "primus.launch.run_node", "primus.preflight"} & modules_after(words, tmp_path)


def test_what_a_command_imports_is_seen(tmp_path: Path) -> None:
    assert {"primus.cli.main", "json"} <= modules_after(["--version"], tmp_path)


@pytest.mark.native
def test_a_worker_of_native_starts_without_what_only_the_launcher_or_the_end_of_a_run_needs() -> None:
    imported = "primus.worker, primus.tasks.train.pretrain, primus.frameworks.native.engine.run"
    program = f"import sys, {imported}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    unused = ("data.tokenizers", "data.readers", "data.shards", "checkpoint.renaming", "engines.requirement")
    names = tuple(f"primus.{name}" for name in (*unused, "tasks.train._job"))
    assert [name for name in done.stdout.split() if name.startswith(names)] == []
