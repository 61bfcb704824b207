"""List the examples that come with primus, or copy some into a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from primus import package_files
from primus.errors import UsageError
from primus.report import table
from primus.runs.files import write_bytes
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config examples`."""

    action: Annotated[Literal["list", "copy"], Meta(extra={"positional": True})] = "list"
    """list, or copy."""
    names: Annotated[list[str], Meta(extra={"positional": True})] = []
    """Examples to copy, such as quickstart; or folders of them, such as plug-ins."""
    output: str = "examples"
    """Folder of the copies."""
    force: bool = False
    """Overwrite existing files."""


def run(options: Options, context: TaskContext) -> None:
    """Print each example with what it is for, or copy the named ones with the files that they need.

    Raises:
        UsageError: An example does not exist, or a file is there already.
    """
    if options.action == "list":
        if options.names:
            raise UsageError(f"config examples list accepts no names: {options.names[0]}", "config examples copy NAME")
        examples = {name: _read_purpose(file) for name, file in package_files.list_examples()}
        context.result(examples, table.format_table(["example", "purpose"], [list(each) for each in examples.items()]))
        return
    if not options.names:
        raise UsageError("config examples copy needs a name", "config examples lists them")
    root = Path(os.path.realpath(package_files.EXAMPLES))
    copies = {file: Path(options.output) / file.relative_to(root) for file in _list_chosen(options.names, root)}
    present = next((target for target in copies.values() if target.exists()), None)
    if present and not options.force:
        raise UsageError(f"{present} exists", "--force replaces it, --output FOLDER copies to another folder")
    for file, target in copies.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, file.read_bytes())
    text = [f"wrote {target}" for target in copies.values()]
    context.result({"files": [str(target) for target in copies.values()]}, "\n".join(text))


def _read_purpose(file: Path) -> str:
    """The comment that begins a file, up to the end of its first sentence."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# ").strip())
    return re.split(r"(?<=[.:])\s", " ".join(lines), maxsplit=1)[0].rstrip(":")


def _list_chosen(names: list[str], root: Path) -> list[Path]:
    """The files of the named examples and folders, without repetition."""
    found: dict[Path, None] = {}
    for name in names:
        wanted = name.removeprefix(package_files.EXAMPLE_PREFIX).rstrip("/")
        folders = sorted({str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()})
        if wanted in folders:
            found |= dict.fromkeys(sorted(path for path in (root / wanted).rglob("*") if path.is_file()))
            continue
        found |= dict.fromkeys(_list_needed(package_files.find_example(wanted), root))
    return list(found)


_EXTENDED = re.compile(r"^(?:extends|bases): *(\S+\.yaml)", re.MULTILINE)
_USED = re.compile(r"\$\{PRIMUS_EXAMPLES:examples\}/([\w./-]+)")


def _list_needed(file: Path, root: Path) -> Iterator[Path]:
    """An example, those that it extends, and the data that it names in the folder of the examples."""
    yield file
    text = file.read_text(encoding="utf-8")
    for name in _EXTENDED.findall(text):
        yield from _list_needed(Path(os.path.normpath(file.parent / name)), root)
    for name in _USED.findall(text):
        path = root / name
        yield from sorted(path.rglob("*")) if path.is_dir() else [path]
