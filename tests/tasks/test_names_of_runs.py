"""Every task that reads a run takes its folder, its id or a beginning of it, and the name of its experiment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from primus import registry
from primus.cli.main import main
from primus.config.docs import read_field_docs
from primus.runs import store
from primus.runs.store import RunMetadata, RunOutcome
from primus.task import TASKS
from traces.chrome_trace import TraceWriter

COMMANDS = {
    "analyze trace": ("RUN", "t.json --against RUN"),
    "checkpoint average": ("RUN RUN --output out",),
    "checkpoint convert": ("RUN out --to native",),
    "checkpoint diff": ("RUN RUN",),
    "checkpoint show": ("RUN",),
    "checkpoint verify": ("RUN",),
    "compare extract": ("RUN",),
    "compare mlperf": ("RUN",),
    "data inspect": ("--run RUN --step 1",),
    "diagnose": ("RUN",),
    "evaluate": ("RUN",),
    "generate": ("RUN --prompt x",),
    "patches list": ("--run RUN",),
    "profile attach": ("RUN",),
    "report": ("RUN",),
    "runs compare": ("RUN RUN",),
    "runs diff": ("RUN RUN",),
    "runs export": ("RUN --output x.tar.gz",),
    "runs gate": ("RUN --baseline RUN",),
    "runs plot": ("RUN --html x.html",),
    "runs rollouts": ("RUN",),
    "runs show": ("RUN",),
    "runs watch": ("RUN",),
    "train pretrain": ("--run RUN", "--replay RUN"),
    "train posttrain": ("--run RUN", "--replay RUN"),
    "train rl": ("--run RUN", "--replay RUN"),
}
"""Words with which each task reads a run."""
NEEDS_TORCH = ("checkpoint", "data", "analyze", "report", "generate", "evaluate")


def takes_names(task: str) -> bool:
    """Whether the help of an option says that it takes a run by name."""
    docs = read_field_docs(registry.load_plug_in(TASKS, task).Options).values()
    is_run = re.compile(r"\b[Rr]uns?\b.*\b(folder|name|id)\b|names? (or folder )?of (a )?runs?", re.DOTALL)
    return any(is_run.search(doc) and re.search(r"experiment|names? (or|of)", doc) for doc in docs)


def test_every_task_whose_help_promises_names_of_runs_is_tested_here() -> None:
    tasks = [
        task for task in registry.list_plug_ins("tasks") if not task.startswith(("jobs", "runs clean", "runs list"))
    ]
    assert {task for task in tasks if takes_names(task)} == set(COMMANDS)


@pytest.mark.parametrize(("task", "words"), [(task, words) for task, each in COMMANDS.items() for words in each])
def test_a_run_is_found_by_its_names_and_a_misspelt_one_gets_the_nearest(
    task: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if task.startswith(NEEDS_TORCH):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    trace = TraceWriter()
    trace.add_kernel("gemm", 0, 40)
    trace.write(Path("t.json"))
    metadata = RunMetadata(
        id="20250101_000000-aaaa", name="night", task="train pretrain", command=[], created=1.0, started=1.0,
        ended=2.0, outcome=RunOutcome(state="failed", exit_code=1),
    )  # fmt: skip
    store.create_run(Path("output/night") / metadata.id, metadata)
    for name in ("night", "20250101", f"night/{metadata.id}", f"output/night/{metadata.id}"):
        main(["direct", "--", *task.split(), *words.replace("RUN", name).split()])
        shown = capsys.readouterr().err
        assert not re.search(f"no run '|not a run folder|: {name}: no such", shown), f"{name}: {shown}"
    assert main(["direct", "--", *task.split(), *words.replace("RUN", "nigth").split()]) == 2
    assert "no run 'nigth' in output\n  did you mean 'night'?" in capsys.readouterr().err
