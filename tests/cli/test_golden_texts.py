"""Help and dry-run as people see them, kept as golden files: `make golden` renews them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes import cli
from fakes.facts import assume_facts
from primus import interpreter
from primus.cli.main import main
from primus.launch import prepare
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.facts import Cpu, MachineFacts

Golden = Callable[[str, str], None]

EXPERIMENT = """\
work_group: ${PRIMUS_TEAM:us}
exp_name: night
env:
  NCCL_DEBUG: WARN
  WANDB_API_KEY: canary-in-the-file
modules:
  pre_trainer:
    framework: abacus
    model: tiny.yaml
    overrides: {mock_data: true, seq_length: 128, train_iters: 4}
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assume_facts(monkeypatch, MachineFacts(cpu=Cpu(usable=16)))
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    return tmp_path


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMUS_PLUGINS", str(cli.PLUGINS))


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints, without what depends on the machine."""
    assert main(words.split()) == 0
    text = (
        capsys.readouterr()
        .out.replace(shlex.quote(sys.executable), "PYTHON")
        .replace(sys.executable, "PYTHON")
        .replace(interpreter.__file__, "primus/interpreter.py")
        .replace(prepare.find_entry_point(), "PRIMUS-CLI")
        .replace(str(Path.cwd()), "/here")
    )
    return re.sub(r"\d{8}_\d{6}-[0-9a-f]{4}", "RUN-ID", text)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--help", "overview"),
        ("direct --help", "direct"),
        ("direct -- train pretrain --help", "train-pretrain"),
        ("direct -- data prepare --help", "data-prepare"),
        ("direct -- config show --help", "config-show"),
        ("direct -- runs diff --help", "runs-diff"),
        ("direct -- runs --help", "runs"),
    ],
)
def test_help(
    words: str, name: str, capsys: pytest.CaptureFixture[str], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "122")
    golden(f"help/{name}.txt", shown(words, capsys))


NODES = "--nproc 8 --nnodes 2 --node-rank 1 --master-addr node0"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("direct -- train pretrain --config night.yaml --lr 1e-4", "direct-1"),
        ("direct --nproc 2 --env HF_TOKEN=canary-typed A=1 -- train pretrain --config night.yaml", "direct-2"),
        (f"direct {NODES} -- train pretrain --config night.yaml env.GH_PAT=canary-over", "direct-2-nodes"),
        ("grid -N 4 -- box --image felt -- train pretrain --config night.yaml --lr 1e-4", "nested"),
        ("grid -- box -- direct --nproc 2 -- train pretrain --config night.yaml", "nested-direct"),
        ("direct --env A=1 -- runs list", "in-process"),
    ],
)
def test_dry_run(
    words: str, name: str, workplace: Path, plugins: None, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    before = sorted(workplace.rglob("*"))
    text = shown(f"--dry-run {words}", capsys)
    values = shown(f"--dry-run --json {words}", capsys)
    assert sorted(workplace.rglob("*")) == before
    assert "canary" not in text + values
    golden(f"dry-run/{name}.txt", text)
    golden(f"dry-run/{name}.json", values)
    assert isinstance(json.loads(values), dict)


def test_a_dry_run_names_what_the_machine_needs(
    workplace: Path, plugins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assume_facts(monkeypatch, build_assumed_machine("mi300x:8"))
    monkeypatch.setenv("HSA_ENABLE_SDMA", "0")
    text = shown("--dry-run direct --env GPU_MAX_HW_QUEUES=4 -- train pretrain --config night.yaml", capsys)
    golden("dry-run/direct-mi300x.txt", text)


def test_a_dry_run_starts_no_process_and_opens_no_file_to_write(tmp_path: Path, workplace: Path) -> None:
    """In a process of its own, whose interpreter reports what it does (PEP 578)."""
    watcher = tmp_path / "watch.py"
    watcher.write_text(
        "import sys\n"
        "WATCHED = ('subprocess', 'os.system', 'os.exec', 'os.fork', 'os.posix', 'socket.', 'os.mkdir', 'os.rename')\n"
        "def hook(event, args):\n"
        "    writes = event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+')\n"
        "    if event.startswith(WATCHED) or writes:\n"
        "        sys.stderr.write(f'DID {event} {args}\\n')\n"
        "sys.dont_write_bytecode = True\n"
        "sys.addaudithook(hook)\n"
        "from primus.cli.main import main\n"
        "sys.exit(main())\n"
    )
    import subprocess

    for words in ("direct -- train pretrain --config night.yaml", "grid -- box -- train pretrain --config night.yaml"):
        argv = [sys.executable, str(watcher), "--dry-run", *words.split()]
        done = subprocess.run(argv, cwd=workplace, env=cli.environment(), capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")
    argv = [sys.executable, str(watcher), "direct", "--", "config", "init", "tiny", "--output", "new.yaml"]
    done = subprocess.run(argv, cwd=workplace, env=cli.environment(), capture_output=True, text=True, timeout=30)
    assert "DID open" in done.stderr, "the watcher sees what is done"
