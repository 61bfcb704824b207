"""The commands of the pages for newcomers work as they are typed there; those of the other pages are valid.

The former run one after the other in an empty folder with the checkout's `primus-cli` and `examples`. Training is cut
to two steps. What needs a scheduler, a container engine, a cluster or a quiet machine to measure runs dry.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primus import registry
from primus.cli import dispatch
from primus.config.overrides import is_known
from primus.errors import UsageError
from primus.launch.command import is_runtime, parse_command, parse_segment_options
from primus.task import TASKS

ROOT = Path(__file__).parents[1]
QUICK_START = "./primus-cli direct -- train pretrain --config examples/quickstart.yaml"
GATE = "./primus-cli direct -- runs gate quickstart --baseline quickstart"
PAGES = ("docs/quickstart.md", "docs/first-steps.md", "docs/index.md", "README.md")
SHORT = ("--train_iters", "2", "--eval_iters", "1", "--micro_batch_size", "1", "--sample_tokens", "4")
"""Behind each training command, unless it repeats a run as it was."""
SHORT_BENCHMARK = ("--duration", "0.1")
DRY = (
    *("container", "slurm", "ssh", "kubernetes", "logs", "cancel", "--perf", "--nproc 8", "compare", "setup"),
    *("--profile", "trace"),  # two steps are too few for them
    "analyze layout",  # a minute
)
"""Words of commands that only run dry here."""
SPELLINGS = ("--lr 1e-4", "--lr=1e-4", "lr=1e-4")
"""Ends of commands that differ from another one in a setting only, which planning reads: they run dry, too."""
EXIT_CODES = {"preflight": (0, 1, 3), "diagnose": (0, 1, 4)}
"""Exit codes of tasks whose answer depends on the machine; 0 for all others."""
PLACEHOLDERS = {
    "FILE": "examples/quickstart.yaml",
    "FILES": "my-texts",
    "NAME": "torchtitan",
    "IMAGE": "rocm/primus:v26.5",
    "ID": "20250101-000000-abcd",
    "...": "examples/quickstart.yaml",
}
CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
"""A model as Hugging Face describes it, for `config import`."""


def commands_of(page: Path) -> list[str]:
    """The commands of a page: its indented lines and code spans, the latter completed where they are parts of one."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            found += [line.strip()] if line.strip().startswith("./primus-cli") else []
            continue
        found += _completed(re.findall(r"`([^`]+)`", line))
    return found


def _completed(spans: list[str]) -> Iterator[str]:
    """Code spans of one line as whole commands; what is neither a command nor a part of one is left out."""
    tasks = registry.list_plug_ins("tasks")
    last = QUICK_START
    for span in spans:
        words = span.removeprefix("... ").split()
        name = words[0].partition("=")[0]
        if words[0] == "./primus-cli":
            last = span
            yield from [span] if len(words) > 1 else []
        elif " ".join(words[:2]) in tasks and len(words) > 2:
            yield f"./primus-cli direct -- {' '.join(words)}"
        elif is_known(name.removeprefix("--")) and ("=" in words[0] or len(words) > 1):
            yield f"{QUICK_START} {' '.join(words)}"
        elif words[0].startswith("--") and not is_known(name.removeprefix("--")) and len(words) == 1:
            yield f"{last} {span}"


def runnable(command: str, folder: Path) -> list[str]:
    """The words of a command with the placeholders replaced, and short or dry where it would take long."""
    runs = sorted(path.name for path in (folder / "output/quickstart").glob("*-*") if path.is_dir())
    values = PLACEHOLDERS | ({"A": runs[0], "B": runs[-1]} if runs else {})
    words = [values.get(word, word) for word in shlex.split(command)]
    is_dry = any(word in command.split() or f" {word} " in f" {command} " for word in DRY)
    # The gate passes a first run, and needs more than two steps to compare others.
    if is_dry or command.endswith(SPELLINGS) or (command == GATE and len(runs) > 1):
        return [*words[:1], "--dry-run", *(word for word in words[1:] if word != "--dry-run")]
    if "train" in words and "--replay" not in words:
        return [*words, *SHORT]
    return [*words, *SHORT_BENCHMARK] if "benchmark" in words else words


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    for name in ("primus-cli", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON))
    for name in ("configuration.md", "training.md", "data.md", "jobs.md"):
        (tmp_path / "my-texts" / name.replace(".md", ".txt")).write_text((ROOT / "docs" / name).read_text())
    return tmp_path


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_commands_of_the_pages_work_as_typed(workplace: Path) -> None:
    commands = [QUICK_START, GATE, *(command for page in PAGES for command in commands_of(ROOT / page))]
    assert GATE in commands[2:]
    environ = os.environ | {
        "XDG_STATE_HOME": str(workplace / "state"),  # `jobs list` asks the schedulers of all recorded jobs
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done_before: list[list[str]] = []
    for command in commands:
        words = runnable(command, workplace)
        if words in done_before:  # on both pages, or with a placeholder for what another command says
            continue
        done_before.append(words)
        done = subprocess.run(
            words, cwd=workplace, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        task = next((word for word in words if word in EXIT_CODES), "")
        assert done.returncode in EXIT_CODES.get(task, (0,)), f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"{shlex.join(words)}\n{done.stderr}"


def test_every_command_of_the_pages_is_found() -> None:
    for page in PAGES:
        assert QUICK_START in commands_of(ROOT / page)
        text = (ROOT / page).read_text(encoding="utf-8")
        assert sum(command.startswith("./primus-cli") for command in commands_of(ROOT / page)) >= text.count(
            "./primus-cli "
        )
    found = commands_of(ROOT / "README.md")
    for part in ("--lr 1e-4", "--lr=1e-4", " lr=1e-4"):
        assert any(command.endswith(part) and command.startswith(QUICK_START) for command in found)
    runtimes = {word for command in found for word in command.split() if is_runtime(word)}
    assert {"direct", "container", "slurm", "ssh", "kubernetes"} <= runtimes


def typed_commands(page: Path) -> Iterator[list[str]]:
    """The words after `./primus-cli` of each complete command of a page, in code blocks and in code spans."""
    for line in re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8")).splitlines():
        block = re.match(r" {4,}[^`']*?\./primus-cli (.*)$", line)
        for command in [block[1]] if block else re.findall(r"`[^`]*?\./primus-cli ([^`]+)`", line):
            words = shlex.split(re.sub(r"(^|\s)#.*", "", command))  # shlex takes a # within a word for one, too
            end = next((place for place, word in enumerate(words) if word in ("|", ">", "&")), len(words))
            if "..." not in words:
                yield words[2:end] if words[0] == "--config" else words[:end]


def test_every_command_of_every_page_has_valid_options() -> None:
    """Runtimes, tasks, options and keys exist; two pages show plug-ins of a user, which other tests run."""
    of_plug_ins = ("plug-ins.md", "write-a-runtime.md")
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in of_plug_ins]
    pages += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")]
    commands = [(page, words) for page in sorted(pages) for words in typed_commands(page)]
    assert len(commands) > 200
    for page, words in commands:
        try:
            request = parse_command(words).request
            for segment in request.runtimes:
                parse_segment_options(segment)
            if request.task:
                task = registry.load_plug_in(TASKS, request.task)
                dispatch.parse_task_words(task, request, request.words)
        except UsageError as error:
            pytest.fail(f"{page.name}: ./primus-cli {shlex.join(words)}\n{error}")
