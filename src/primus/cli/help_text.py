"""Help for the command, its runtimes and its tasks; only the requested plug-in is imported."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence

from primus import registry
from primus.config.docs import read_field_docs
from primus.launch.command import GlobalOptions
from primus.runtime import RUNTIMES, LaunchRequest

TASK_GROUPS = {
    "training": (
        *("train pretrain", "train posttrain", "train rl"),
        *(
            "config init",
            "config check",
            "config show",
            "config schema",
            "config import",
            "config export",
            "config examples",
        ),
    ),
    "data": (
        *("data prepare", "data fetch", "data clean", "data dedup", "data encode"),
        *("data verify", "data inspect", "data fingerprint"),
    ),
    "checkpoints": (
        *("checkpoint convert", "checkpoint show", "checkpoint verify", "checkpoint diff", "checkpoint average"),
        "generate",
        "evaluate",
    ),
    "runs and jobs": (
        *("runs list", "runs show", "runs watch", "runs plot", "runs diff", "runs compare", "runs gate"),
        *("runs rollouts", "runs clean"),
        *("diagnose", "drill"),
        *("jobs list", "jobs show", "jobs logs", "jobs wait", "jobs cancel"),
    ),
    "speed": (
        *("report", "benchmark"),
        *("tune train", "tune sweep", "tune gemm", "tune collectives"),
        *("analyze trace", "profile attach"),
    ),
    "comparisons": (
        *("compare engines", "compare run", "compare report", "compare extract", "compare mlperf"),
        *("compare wrap", "compare purge"),
    ),
    "machine": (
        "preflight",
        *("nodes list", "nodes add", "nodes remove", "nodes check"),
        "env show",
        "analyze topology",
        "engines",
        "setup",
        "upgrade-notes",
        *("image build", "image list", "image show", "image clean"),
        "hooks list",
        "patches list",
        "node-smoke",
    ),
}
"""Tasks in the order of the help, most used first in each group. An unlisted task follows the tasks with the same first
word; unlisted tasks with a new first word form the last group."""
OTHER_GROUP = "other tasks"
RUNTIME_ORDER = ("direct", "container", "slurm", "kubernetes", "ssh")

WIDEST = 122
"""Columns of the help where there is no terminal, or a wider one: longer lines are hard to read."""

USAGE = "primus-cli [options] <runtime> [options] [-- <runtime> [options]] -- <task> [options]"
EXAMPLES = (
    "primus-cli direct -- train pretrain --config examples/quickstart.yaml",
    "primus-cli slurm sbatch -N 4 -- container --image IMAGE -- train pretrain --config FILE",
    "primus-cli --dry-run direct -- train pretrain --config FILE",
)


def format_overview() -> str:
    """Help of the whole command."""
    docs = read_field_docs(GlobalOptions)
    options = [(f"--{name.replace('_', '-')}", text) for name, text in docs.items()]
    options += [
        ("--config FILE", "File of default options of the runtimes; overrides those of the user and the site."),
        ("--version", "Print the version."),
        ("completion bash|zsh|fish", "Print the script that completes command lines in this shell."),
        ("-h, --help", "Print help; of a runtime or task if one is given."),
    ]
    runtimes = sorted(registry.list_plug_ins("runtimes"), key=lambda name: _find_position(name, RUNTIME_ORDER))
    sections = [("runtimes (where to run)", [(name, registry.read_summary("runtimes", name)) for name in runtimes])]
    sections += [(f"tasks: {group}", rows) for group, rows in _group_tasks()]
    width = max(len(name) for _, rows in sections for name, _ in rows)
    blocks = [
        _wrap_usage(USAGE),
        _wrap_text("One entry point for LLM training work: the runtime says where, the task says what."),
        "examples:\n" + "\n".join(f"  {_break_command(example)}" for example in EXAMPLES),
        *(f"{title}:\n{_format_table(rows, width)}" for title, rows in sections),
        f"options:\n{_format_table(options)}",
        _wrap_text("Options of a runtime or task: primus-cli <runtime> --help, primus-cli <runtime> -- <task> --help"),
    ]
    return "\n\n".join(blocks)


def _group_tasks() -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of tasks with their summaries; tasks of plug-ins follow those with the same first word."""
    listed = {name: group for group, names in TASK_GROUPS.items() for name in names}
    heads = {name.split()[0]: group for name, group in listed.items()}
    groups: dict[str, list[tuple[str, str]]] = {group: [] for group in (*TASK_GROUPS, OTHER_GROUP)}
    for name, text in _list_task_summaries():
        groups[listed.get(name) or heads.get(name.split()[0], OTHER_GROUP)].append((name, text))
    return [(group, rows) for group, rows in groups.items() if rows]


def format_help(request: LaunchRequest) -> str:
    """Help of the task of `request`, or of its runtimes if it has no task."""
    tasks = registry.list_plug_ins("tasks")
    if request.task in tasks:
        return _format_task_help(request.runtimes[-1].name, request.task, request.words)
    if request.task:
        rows = [(name, text) for name, text in _list_task_summaries() if name.split()[0] == request.task]
        usage = _wrap_usage(f"primus-cli <runtime> -- {request.task} <subtask> [options]")
        return f"{usage}\n\nsubtasks:\n{_format_table(rows)}"
    return "\n\n".join(_format_runtime_help(segment.name) for segment in request.runtimes)


def _list_task_summaries() -> list[tuple[str, str]]:
    """Tasks in the order of the help, without internal ones, which their summaries identify."""
    order = [name for names in TASK_GROUPS.values() for name in names]
    names = sorted(registry.list_plug_ins("tasks"), key=lambda name: _find_position(name, order))
    tasks = [(name, registry.read_summary("tasks", name)) for name in names]
    return [(name, text) for name, text in tasks if not text.endswith("(internal).")]


def _find_position(name: str, order: Sequence[str]) -> float:
    """Position of `name`: that in `order`, else after the last name with the same first word, else the end."""
    if name in order:
        return order.index(name)
    same = [number for number, each in enumerate(order) if each.split()[0] == name.split()[0]]
    return same[-1] + 0.5 if same else len(order)


def _format_runtime_help(name: str) -> str:
    from primus.config import flags

    module = registry.load_plug_in(RUNTIMES, name)
    commands = module.COMMANDS
    usage = _wrap_usage(f"primus-cli {name} [options] -- <task> [options]")
    own = "<command>" if isinstance(commands, dict) else "|".join(commands)
    usage += f"\n       primus-cli {name} {own} [options]" if own else ""
    blocks = [usage, _wrap_text(registry.read_summary("runtimes", name))]
    blocks += [f"commands:\n{_format_table(list(commands.items()))}"] if isinstance(commands, dict) else []
    return "\n\n".join([*blocks, f"options:\n{_format_table(flags.describe_flags(module.Options))}"])


def _format_task_help(runtime: str, name: str, words: Sequence[str]) -> str:
    from primus.config import flags
    from primus.task import TASKS

    module = registry.load_plug_in(TASKS, name)
    options = module.choose_options(words)
    rows = flags.describe_flags(options)
    summary = registry.read_summary("tasks", name)
    if options is not module.Options:  # the first word chooses them, and their module says what it does
        name, summary = f"{name} {words[0]}", (sys.modules[options.__module__].__doc__ or "").partition("\n")[0]
        rows = [row for row in rows if not row[0].startswith("[")]
    blocks = [_wrap_usage(f"primus-cli {runtime} -- {name} [options]"), _wrap_text(summary)]
    blocks += [f"options:\n{_format_table(rows)}"] if rows else []
    if module.OVERRIDES:
        blocks.append(
            _wrap_text(
                "Any key of the experiment can be overridden: --train_iters 10, --lr=1e-4, seq_length=512, --no-bf16."
            )
            + "\nAll keys: primus-cli direct -- config schema --text"
        )
    return "\n\n".join(blocks)


def _format_table(rows: Sequence[tuple[str, str]], width: int = 0) -> str:
    width = width or min(30, max((len(left) for left, _ in rows), default=0))
    return "\n".join(_format_row(left, right, width) for left, right in rows)


def _format_row(left: str, right: str, width: int) -> str:
    indent = " " * (width + 4)
    lines = _wrap_text(right, width + 4).split("\n") if right else [""]
    first = f"  {left:<{width}}  " if len(left) <= width else f"  {left}\n{indent}"
    return (first + f"\n{indent}".join(lines)).rstrip()


def _wrap_text(text: str, indent: int = 0) -> str:
    """Lines that fit the terminal behind an indent, broken at spaces only: a command or a path stays whole."""
    return textwrap.fill(text, max(_find_width() - indent, 20), break_long_words=False, break_on_hyphens=False)


def _wrap_usage(usage: str) -> str:
    lines = _wrap_text(usage, len("usage: ")).split("\n")
    return "usage: " + f"\n{' ' * len('usage: ')}".join(lines)


def _break_command(command: str) -> str:
    """A command as it can be typed in lines that fit the terminal."""
    if len(command) + 2 <= _find_width():
        return command
    return command.replace(" -- ", " \\\n    -- ")


def _find_width() -> int:
    """Columns for the help: those of the terminal, also of one that shows it by a pager."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return min(int(os.environ["COLUMNS"]), WIDEST) or WIDEST
    for stream in (1, 2, 0):
        with contextlib.suppress(OSError):
            return min(os.get_terminal_size(stream).columns, WIDEST) or WIDEST
    return WIDEST
