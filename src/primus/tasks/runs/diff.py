"""Compare two runs: configuration, environment, results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from primus.config.flags import Positional
from primus.report import table
from primus.runs import events, store, summary
from primus.runs.store import Run
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs diff`."""

    a: Positional
    """First run: a folder, an id or the beginning of one, or an experiment's name."""
    b: Positional
    """Second run."""
    workspace: str = "./output"
    """Folder of all run folders."""


class Change(Struct, frozen=True):
    """One thing that differs."""

    what: str
    a: Any
    b: Any


def run(options: Options, context: TaskContext) -> None:
    """Print what differs.

    Raises:
        UsageError: There is no such run.
    """
    a, b = (store.find(name, Path(options.workspace)) for name in (options.a, options.b))
    sections = {
        "configuration": _changes(summary.flat_settings(a), summary.flat_settings(b)),
        "environment": _changes(_environment(a), _environment(b)),
        "packages": _changes(_packages(a), _packages(b)),
        "results": _results(a, b),
    }
    value = {"a": str(a.directory), "b": str(b.directory), **sections}
    context.result(value, "\n\n".join(_block(title, changes, a, b) for title, changes in sections.items()))


def _changes(a: dict[str, Any], b: dict[str, Any]) -> list[Change]:
    absent = "absent"
    names = sorted(name for name in a.keys() | b.keys() if a.get(name, absent) != b.get(name, absent))
    return [Change(name, a.get(name, absent), b.get(name, absent)) for name in names]


def _environment(run: Run) -> dict[str, str]:
    """Variables that the run set itself, and the machine's facts."""
    dump = run.directory / "env" / "primus_env_dump.txt"
    lines = dump.read_text(encoding="utf-8", errors="replace").splitlines() if dump.is_file() else []
    ours = [line.rpartition("  # ")[0] for line in lines if not line.endswith("  # shell")]
    variables = dict(line.split("=", 1) for line in ours if "=" in line)
    devices = run.directory / "env" / "gpu_model.txt"
    metadata = run.metadata()
    return variables | {
        "(host)": metadata.host,
        "(devices)": devices.read_text().strip() if devices.is_file() else "unknown",
        "(git revision)": metadata.git_revision or "unknown",
    }


def _packages(run: Run) -> dict[str, str]:
    path = run.directory / "env" / "packages.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return dict(line.split("==", 1) for line in lines if "==" in line)


def _results(a: Run, b: Run) -> list[Change]:
    first, second = summary.of(a), summary.of(b)
    names = ("state", "steps", "last_loss", "eval_loss", "tokens_per_s", "duration_s")
    changes = [Change(name, getattr(first, name), getattr(second, name)) for name in names]
    losses_a, losses_b = ({event["step"]: event.get("loss") for event in events.steps(run.events)} for run in (a, b))
    common = sorted(losses_a.keys() & losses_b.keys())
    apart = next((step for step in common if losses_a[step] != losses_b[step]), None)
    verdict = f"equal bit by bit on all {len(common)} common steps" if apart is None else f"differ from step {apart} on"
    return [*changes, Change("losses", verdict, "")]


def _block(title: str, changes: list[Change], a: Run, b: Run) -> str:
    if not changes:
        return f"{title}: no difference"
    rows = [[change.what, _shown(change.a), _shown(change.b)] for change in changes]
    return f"{title}:\n" + "\n".join("  " + line for line in table.table(["", a.id, b.id], rows).splitlines())


def _shown(value: Any) -> str:
    return table.number(value) if isinstance(value, float) else str(value)
