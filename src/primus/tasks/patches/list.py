"""List the patches of upstream packages and the files of --patch."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct, structs

from primus import patch
from primus.config.flags import RunName
from primus.patch import PatchChoice
from primus.report import table
from primus.runs import events, patch_records, store
from primus.runs.store import Run
from primus.task import TaskContext

SHOWS_PATCHES = True
"""The files of `--patch` are shown here, not run."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `patches list`."""

    run: RunName | None = None
    """Show the patches of this run (folder, run id or experiment) instead of those of this machine."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


class PatchFile(Struct, frozen=True):
    """A file of `--patch`."""

    file: str
    sha256: str


def run(options: Options, context: TaskContext) -> None:
    """Print the patches.

    Raises:
        UsageError: The run or the patch does not exist.
    """
    if options.run:
        _show_run(store.find_run(options.run, Path(options.workspace)), context)
        return
    wanted, _ = patch.list_chosen_names(context.environ)
    found = patch.choose_patches({})
    files = [
        PatchFile(file, patch_records.hash_patch(Path(os.path.expanduser(file)).read_bytes()))
        for file in context.patches
    ]
    values = {"patches": [{"wanted": choice.name in wanted, "choice": choice} for choice in found], "files": files}
    context.result(values, "\n\n".join([_format_patch_table(found, wanted), *_format_patch_files(files)]))


def _show_run(found: Run, context: TaskContext) -> None:
    applied = [event["applied"] for event in events.read_events(found.events) if event["kind"] == "patches"]
    by_node = patch_records.read_all_records(found)
    python = [[each["name"], each["target"], each["version"], each["state"]] for each in (applied or [[]])[-1]]
    files = [
        [each.file, str(node), each.sha256[:12], each.state, "-" if each.exit_code is None else str(each.exit_code)]
        for node, records in by_node.items()
        for each in records
    ]
    values = [{"node": node, **structs.asdict(each)} for node, records in by_node.items() for each in records]
    parts = [
        table.format_table(["patch", "target", "version", "state"], python)
        if python
        else "no patches of upstream packages",
        table.format_table(["file", "node", "sha256", "state", "exit code"], files) if files else "no patch files",
    ]
    context.result({"patches": (applied or [[]])[-1], "files": values}, "\n\n".join(parts))


def _format_patch_table(found: list[PatchChoice], wanted: list[str]) -> str:
    if not found:
        return "no patches of upstream packages"
    rows = [
        [
            choice.name,
            choice.patch.target,
            choice.installed or "-",
            choice.patch.versions,
            choice.state if choice.name in wanted else "switched off",
            f"{choice.patch.reason} ({choice.patch.link})",
        ]
        for choice in found
    ]
    return table.format_table(["patch", "target", "installed", "range", "state", "reason"], rows)


def _format_patch_files(files: list[PatchFile]) -> list[str]:
    if not files:
        return []
    return [table.format_table(["file", "sha256"], [[each.file, each.sha256[:12]] for each in files])]
