"""Show the request, progress and results of one run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from primus.config.flags import PositionalRun
from primus.config.source import format_yaml_value
from primus.launch.nodes.avoided_nodes import AvoidedNodes, read_avoided_nodes
from primus.report import table
from primus.runs import events, store, summary
from primus.runs.evaluations import CheckpointEvaluation, read_evaluations
from primus.runs.settings_in_force import SettingInForce, read_settings_in_force
from primus.runs.store import Run, RunMetadata
from primus.task import TaskContext

LAST_STEPS = 5


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs show`."""

    run: PositionalRun
    """Run folder, run id or its beginning, or name of an experiment (its newest run)."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def run(options: Options, context: TaskContext) -> None:
    """Print the run.

    Raises:
        UsageError: The run does not exist.
    """
    found = store.find_run(options.run, Path(options.workspace))
    metadata, item = found.read_metadata(), summary.summarize_run(found)
    steps = events.read_steps(found.events)[-LAST_STEPS:]
    settings = read_settings_in_force(events.read_events(found.events))
    nodes = read_avoided_nodes(found)
    values = {"metadata": metadata, "summary": item, "last_steps": steps, "settings_in_force": settings}
    evaluations = read_evaluations(found)
    values["evaluations"] = evaluations
    values["unfit_nodes"] = {"avoided": nodes.avoided, "used": nodes.used}
    context.result(
        values,
        "\n\n".join(
            part
            for part in [
                _format_run_facts(metadata, item, nodes),
                _format_last_steps(steps),
                _format_evaluations(evaluations),
                _format_settings_in_force(settings),
                _format_tensorboard_command(found),
                _format_file_list(found),
            ]
            if part
        ).rstrip(),
    )


def _format_run_facts(metadata: RunMetadata, item: summary.RunSummary, nodes: AvoidedNodes) -> str:
    outcome = metadata.outcome
    revision = (
        metadata.git_revision[:12] + (" (with changes)" if metadata.git_dirty else "") if metadata.git_revision else "-"
    )
    rows = {
        "run": f"{item.id} ({metadata.name})",
        "state": f"{item.state}{f', exit code {outcome.exit_code}' if outcome.exit_code is not None else ''}",
        "reason": outcome.reason,
        "first failure": _format_first_failure(metadata),
        "command": "primus-cli " + " ".join(metadata.command),
        "created": f"{table.format_time(metadata.created)} by {metadata.user} on {metadata.host}",
        "time": table.format_duration(item.duration_s),
        "attempts": str(metadata.attempts),
        "revision": revision,
        "avoided nodes": _format_nodes(nodes.avoided),
        "unfit nodes": _format_nodes(nodes.used),
        "replay of": metadata.replay_of or "",
        "forced over": "; ".join(metadata.forced),
        "steps": str(item.steps),
        "rewinds": str(item.rewinds) if item.rewinds else "",
        "loss": f"{table.format_number(item.last_loss)} (evaluation {table.format_number(item.eval_loss)})",
        "tokens/s": table.format_number(item.tokens_per_s),
        "checkpoints": str(item.checkpoints),
        "size": table.format_size(item.size_bytes),
    }
    return "\n".join(f"{name + ':':<15}{value}" for name, value in rows.items() if value)


def _format_nodes(nodes: Mapping[str, str]) -> str:
    return f"\n{'':<15}".join(f"{name}: {why}" for name, why in nodes.items())


def _format_first_failure(metadata: RunMetadata) -> str:
    failure = metadata.outcome.first_failure
    return f"rank {failure.rank} on {failure.host}, see {failure.log}" if failure else ""


def _format_last_steps(steps: list[events.Event]) -> str:
    if not steps:
        return "no steps"
    names = ["step", "loss", "grad_norm", "learning_rate", "tokens_per_s"]
    rows = [
        [table.format_number(step.get(name)) if name != "step" else str(step[name]) for name in names] for step in steps
    ]
    return table.format_table(["step", "loss", "grad norm", "lr", "tokens/s"], rows, right=range(5))


def _format_evaluations(evaluations: list[CheckpointEvaluation]) -> str:
    if not evaluations:
        return ""
    rows = [
        ["-" if each.step is None else str(each.step), each.name, name, table.format_number(value)]
        for each in evaluations
        for name, value in each.metrics.items()
    ]
    return table.format_table(["step", "evaluated on", "metric", "value"], rows, right=(0, 3))


def _format_settings_in_force(settings: list[SettingInForce]) -> str:
    """Those that differ from what was asked for, then those that nobody asked for; the others are counted."""
    order = ("not in force", "explained", "not asked")
    shown = sorted((each for each in settings if each.state in order), key=lambda each: order.index(each.state))
    if not shown:
        return ""
    rows = []
    for each in shown:
        asked = "" if each.state == "not asked" else format_yaml_value(each.asked)
        reason = "not in force" if each.state == "not in force" else each.reason
        rows.append([each.key, asked, format_yaml_value(each.in_force), reason])
    title = f"settings in force after the first step; {len(settings) - len(shown)} others are as asked"
    return f"{title}\n{table.format_table(['setting', 'asked', 'in force', ''], rows)}"


def _format_tensorboard_command(found: Run) -> str:
    """The command that shows the run's TensorBoard files; its package need not be on the PATH."""
    folder = found.directory / "tensorboard"
    if not folder.is_dir():
        return ""
    return f"tensorboard: {shlex.join([sys.executable, '-m', 'tensorboard.main', '--logdir', str(folder)])}"


def _format_file_list(found: Run) -> str:
    listed = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in found.directory.iterdir())
    return f"{found.directory}\n  " + "  ".join(name for name in listed if not name.startswith("."))
