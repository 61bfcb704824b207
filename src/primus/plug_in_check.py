"""`python -m primus.plug_in_check [FILE ...]`: check plug-in files against their contracts, and their types with mypy.

Without files, every Python plug-in of `$PRIMUS_PLUGINS` is checked. The exit code is 0 if all files pass, 1 if one
fails, 2 if a file is not in the folder of a kind.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from primus import registry
from primus.benchmark import BENCHMARKS
from primus.callback import CALLBACKS
from primus.contract import PlugInKind, list_members
from primus.data.source import SOURCES
from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError, UsageError
from primus.framework import CHECKPOINTS, EXPORTS, FRAMEWORKS, IMPORTS, LOGS, TRANSLATIONS, VARIABLES
from primus.observer import OBSERVERS
from primus.patch import PATCHES
from primus.reward import REWARDS
from primus.runtime import JOB_RUNTIMES, RUNTIMES
from primus.task import TASKS

KINDS: dict[str, PlugInKind[Any]] = {
    kind.name: kind
    for kind in (
        *(TASKS, RUNTIMES, BENCHMARKS, CALLBACKS, OBSERVERS, REWARDS, SOURCES, PATCHES),
        *(FRAMEWORKS, TRANSLATIONS, IMPORTS, EXPORTS, LOGS, VARIABLES, CHECKPOINTS),
    )
}
"""Kinds whose plug-ins are Python files, by the name of their folder."""

_MYPY_LINE = re.compile(r"(?P<file>.+?):(?P<line>\d+): error: (?P<message>.*)")


class PlugInFile(Struct, frozen=True):
    """A file to check."""

    path: Path
    root: Path
    """Folder that holds the folder of its kind."""
    name: str
    kinds: tuple[PlugInKind[Any], ...]
    """The contracts that it is checked against."""


class TypedMember(Struct, frozen=True):
    """Where a member is defined, for an error in the line that compares it with the contract."""

    line: int
    signature: str


def main(argv: Sequence[str]) -> int:
    """Check the files of `argv`; gives the exit code."""
    try:
        paths = [Path(word).resolve() for word in argv] or _list_user_files()
        files = [_locate_file(path) for path in paths]
    except PrimusError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # The registry finds a file of the user by its folder; the folders given here come first.
    roots = [str(file.root) for file in files if file.root != registry.PACKAGE]
    os.environ["PRIMUS_PLUGINS"] = os.pathsep.join([*dict.fromkeys(roots), os.environ.get("PRIMUS_PLUGINS", "")])
    problems = [problem for file in files for problem in _check_members(file)]
    if importlib.util.find_spec("mypy"):
        problems += _check_types(files)
    else:
        print("mypy is not installed: the types are not checked", file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{len(files)} plug-ins implement their contracts")
    return EXIT_FAILED if problems else EXIT_OK


def _list_user_files() -> list[Path]:
    roots = [Path(os.path.expanduser(root)) for root in os.environ.get("PRIMUS_PLUGINS", "").split(os.pathsep) if root]
    if not roots:
        raise UsageError("no plug-ins to check", "name the files, or set PRIMUS_PLUGINS")
    return [
        file
        for root in roots
        for kind in KINDS
        for name in registry.list_plug_ins(kind)
        if (file := registry.find_plug_in_file(kind, name)) and file.is_relative_to(root)
    ]


def _locate_file(path: Path) -> PlugInFile:
    """Identify the plug-in at `path` by the folder of a kind above it.

    Raises:
        UsageError: The file does not exist, or no folder above it is that of a kind.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    plug_in = path.parent if path.name == "__init__.py" else path
    # A task may be in a group, whose folder may have any name, that of a kind as well.
    folder = plug_in.parent.parent if plug_in.parent.parent.name == TASKS.name else plug_in.parent
    part = next((kind for kind, file in registry.PARTS.items() if file == path.name), "")
    if part in KINDS and folder.parent.name == FRAMEWORKS.name:
        root = registry.PACKAGE if path.is_relative_to(registry.PACKAGE) else folder.parent.parent
        return PlugInFile(path, root, folder.name, (KINDS[part],))
    if folder.name not in KINDS:
        raise UsageError(f"{path}: not in the folder of a kind", f"one of {', '.join(KINDS)}")
    kinds = [KINDS[folder.name]]
    if kinds == [RUNTIMES] and {"find_states", "cancel"} & set(_list_definitions(path)):
        kinds.append(JOB_RUNTIMES)
    name = " ".join(plug_in.relative_to(folder).with_suffix("").parts)
    root = registry.PACKAGE if folder.is_relative_to(registry.PACKAGE) else folder.parent
    return PlugInFile(path, root, name, tuple(kinds))


def _check_members(file: PlugInFile) -> Iterator[str]:
    """Load the file as the launcher does."""
    if TASKS in file.kinds and registry.has_plug_in(RUNTIMES.name, file.name.partition(" ")[0]):
        yield f"{file.path}: a runtime has the name of the task, so that the task cannot be typed: rename the file"
    for kind in file.kinds:
        try:
            registry.load_plug_in(kind, file.name)
        except PrimusError as error:
            yield str(error)


def _check_types(files: Sequence[PlugInFile]) -> list[str]:
    """Errors of mypy in the files, and in the comparison of each member with its contract.

    Each file is checked with lines below it that assign its members to variables of the types in the contract. The
    file itself is not changed: mypy reads a shadow of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        options: list[str] = []
        members: dict[Path, dict[int, TypedMember]] = {}
        for number, file in enumerate(files):
            shadow = Path(folder, f"{number}.py")
            text, members[file.path] = _format_shadow(file)
            shadow.write_text(text, encoding="utf-8")
            options += ["--shadow-file", str(file.path), str(shadow)]
        bases = dict.fromkeys(str(file.root) for file in files if file.root != registry.PACKAGE)
        mypy_path = os.pathsep.join([*bases, str(registry.PACKAGE.parent)])
        # Modules that the files import are followed as usual, so that a check of a whole project shares its cache; what
        # is wrong in them is not reported.
        command = [sys.executable, "-m", "mypy", "--explicit-package-bases"]
        command += ["--show-absolute-path", "--no-error-summary", "--no-pretty", *options]
        done = subprocess.run(
            [*command, *(str(file.path) for file in files)],
            env={**os.environ, "MYPYPATH": mypy_path},
            capture_output=True,
            text=True,
            check=False,
        )
    found = [problem for line in done.stdout.splitlines() if (problem := _format_problem(line, members))]
    if done.returncode > 1 and not found:  # mypy itself failed
        found = [(done.stderr or done.stdout).strip()]
    return found


def _format_shadow(file: PlugInFile) -> tuple[str, dict[int, TypedMember]]:
    """The text of the file with the comparisons below, and the member that each line compares."""
    text = file.path.read_text(encoding="utf-8")
    definitions = _list_definitions(file.path)
    lines = text.splitlines()
    compared: dict[int, TypedMember] = {}
    for number, kind in enumerate(file.kinds):
        contract = kind.contract
        lines.append(f"from {contract.__module__} import {contract.__name__} as _Contract{number}")
        lines.append(f"def _compare_with_contract_{number}(contract: _Contract{number}) -> None:")
        for member in list_members(contract):
            if member.name in definitions:
                lines.append(f"    expected_{member.name} = contract.{member.name}")
                lines.append(f"    expected_{member.name} = {member.name}")
                compared[len(lines)] = TypedMember(definitions[member.name], member.format_signature())
        lines.append("    del contract")
    return "\n".join(lines) + "\n", compared


def _list_definitions(path: Path) -> dict[str, int]:
    """Line of each name that a file defines or imports at its top level; none if it cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, int] = {}
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, ast.ImportFrom):
            names = [each.asname or each.name for each in node.names]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        found |= dict.fromkeys(names, node.lineno)
    return found


def _format_problem(line: str, members: dict[Path, dict[int, TypedMember]]) -> str | None:
    match = _MYPY_LINE.fullmatch(line)
    file = Path(match["file"]) if match else None
    if match is None or file not in members:
        return None
    member = members[file].get(int(match["line"]))
    if member is None:
        return line
    return f"{file}:{member.line}: error: {match['message']}\n  the contract: {member.signature}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
