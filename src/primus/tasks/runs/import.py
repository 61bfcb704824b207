"""Check the archive of a run, and write its run folder into the workspace, to be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from primus.config.flags import Positional
from primus.errors import escape_controls
from primus.report import table
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs import`."""

    file: Positional
    """Archive that `runs export` wrote, or the folder that it was unpacked to."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """Where the run would be written."""
    return [f"checks all of {options.file}, then writes its run into {options.workspace}"]


def run(options: Options, context: TaskContext) -> None:
    """Import the run.

    Raises:
        UsageError: It is not an archive of a run, of a later version, or the run exists.
        UnfitError: Nothing on this machine reads .zst.
        PrimusError: It is damaged, or holds something else than its manifest says.
    """
    from primus.run_archive.import_run import import_run

    found = import_run(Path(options.file).expanduser(), Path(options.workspace), context.environ)
    lines = [f"{found.run}: {table.format_size(found.size_bytes)}"]
    lines += [f"without {each}" for each in found.omitted]
    lines += [f"a replay executes {each}: read it first" for each in found.patches]
    if found.plug_ins:
        lines.append(f"a replay needs its plug-ins: read them, then export PRIMUS_PLUGINS={':'.join(found.plug_ins)}")
    lines = [escape_controls(line) for line in lines]
    context.result(found, "\n".join([*lines, f"repeat it: primus-cli direct -- {found.task} --replay {found.run}"]))
