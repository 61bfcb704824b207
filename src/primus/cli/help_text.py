"""Help for the command, its runtimes and its tasks; only what is asked about is imported."""

from __future__ import annotations

from collections.abc import Sequence

from primus import registry
from primus.config.docs import field_docs
from primus.launch.command import GlobalOptions
from primus.launch.request import LaunchRequest
from primus.runtime import RUNTIMES

USAGE = "primus-cli [options] <runtime> [options] [-- <runtime> [options]] -- <task> [options]"


def format_overview() -> str:
    """Help of the whole command."""
    docs = field_docs(GlobalOptions)
    options = [(f"--{name.replace('_', '-')}", text) for name, text in docs.items()]
    options += [
        ("--config FILE", "Launcher file, over ~/.primus.yaml: default options of the runtimes."),
        ("--version", "Print the version."),
        ("-h, --help", "Print help, of a runtime or a task where one is named."),
    ]
    sections = [
        (
            "runtimes (where)",
            [(name, registry.read_summary("runtimes", name)) for name in registry.list_plug_ins("runtimes")],
        ),
        ("tasks (what)", _list_task_summaries()),
        ("options", options),
    ]
    blocks = [f"usage: {USAGE}", "One entry point for LLM training work: the runtime says where, the task says what."]
    blocks += [f"{title}:\n{_format_table(rows)}" for title, rows in sections]
    blocks.append("first steps:\n  primus-cli direct -- train pretrain --config examples/quickstart.yaml")
    return "\n\n".join(blocks)


def format_help(request: LaunchRequest) -> str:
    """Help of the task of `request`, or of its runtimes where it has none."""
    tasks = registry.list_plug_ins("tasks")
    if request.task in tasks:
        return _format_task_help(request.runtimes[-1].name, request.task)
    if request.task:
        rows = [(name, text) for name, text in _list_task_summaries() if name.split()[0] == request.task]
        return f"usage: primus-cli <runtime> -- {request.task} <subtask> [options]\n\nsubtasks:\n{_format_table(rows)}"
    return "\n\n".join(_format_runtime_help(segment.name) for segment in request.runtimes)


def _list_task_summaries() -> list[tuple[str, str]]:
    """Tasks with the first line of their documentation; those that only primus itself calls say so there."""
    tasks = [(name, registry.read_summary("tasks", name)) for name in registry.list_plug_ins("tasks")]
    return [(name, text) for name, text in tasks if not text.endswith("(internal).")]


def _format_runtime_help(name: str) -> str:
    from primus.config import flags

    module = registry.load_plug_in(RUNTIMES, name)
    commands = module.COMMANDS
    usage = f"usage: primus-cli {name} [options] -- <task> [options]"
    own = "<command>" if isinstance(commands, dict) else "|".join(commands)
    usage += f"\n       primus-cli {name} {own} [options]" if own else ""
    blocks = [usage, registry.read_summary("runtimes", name)]
    blocks += [f"commands:\n{_format_table(list(commands.items()))}"] if isinstance(commands, dict) else []
    return "\n\n".join([*blocks, f"options:\n{_format_table(flags.describe_flags(module.Options))}"])


def _format_task_help(runtime: str, name: str) -> str:
    from primus.config import flags
    from primus.task import TASKS

    module = registry.load_plug_in(TASKS, name)
    rows = flags.describe_flags(module.Options)
    blocks = [f"usage: primus-cli {runtime} -- {name} [options]", registry.read_summary("tasks", name)]
    blocks += [f"options:\n{_format_table(rows)}"] if rows else []
    if module.OVERRIDES:
        blocks.append(
            "Any key of the experiment may follow: --train_iters 10, --lr=1e-4, seq_length=512, --no-bf16.\n"
            "All keys: primus-cli direct -- config schema --text"
        )
    return "\n\n".join(blocks)


def _format_table(rows: Sequence[tuple[str, str]]) -> str:
    width = min(30, max((len(left) for left, _ in rows), default=0))
    return "\n".join(_format_row(left, right, width) for left, right in rows)


def _format_row(left: str, right: str, width: int) -> str:
    indent = " " * (width + 4)
    lines = _wrap_text(right, 118 - width)
    first = f"  {left:<{width}}  " if len(left) <= width else f"  {left}\n{indent}"
    return (first + f"\n{indent}".join(lines)).rstrip()


def _wrap_text(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
