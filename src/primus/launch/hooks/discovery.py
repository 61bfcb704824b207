"""Find the hooks of a task in folders by name, and read the declarations of hooks and patches without running them.

A folder of hooks holds files for every task that starts workers, folders `<task>/` and `<task>/<subtask>/` for one, and
in these `<framework>/` for experiments of one backend. Directly in each of them, or in its `before/`, are hooks that
run before the task; in `after/` and `failure/` the others. The hooks of AMD-AGI/Primus (runner/helpers/hooks) run as
its runner/helpers/execute_hooks.sh runs them.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from primus.errors import UsageError, did_you_mean
from primus.hook import STAGES, Stage
from primus.launch.hooks.time_limit import parse_seconds
from primus.machine.tree import build_sort_key
from primus.plan import Action

TIMEOUT_S = 600.0
PRIMUS_TIMEOUT_S = 3600.0
"""Time limit of hooks of AMD-AGI/Primus, which build packages and prepare data, and declare no limit."""
CHECKOUT_HOOKS = "runner/helpers/hooks"
"""Folder of hooks in a checkout of AMD-AGI/Primus, and in that of a user who follows its guide."""
PRIMUS_RUNNER = "execute_hooks.sh"
"""File next to the folder of hooks of AMD-AGI/Primus, which identifies it."""
TIMEOUT_VARIABLE = "PRIMUS_HOOK_TIMEOUT"
HEADER_LINES = 20

_NAME = re.compile(r"[^._].*\.(sh|py)")
_MARKER = re.compile(r"#\s*primus:\s*(.*)")
MARKERS = ("once", "lock", "timeout=SECONDS")


def find_hooks(
    task: str, environ: Mapping[str, str], *, starts_workers: bool, framework: str | None = None
) -> tuple[Action, ...]:
    """The hooks of `task` in running order: general ones first, then by file name, then by place.

    Args:
        task: ``train pretrain``.
        environ: Variables with the folders and the time limit.
        starts_workers: Whether hooks for every task are included.
        framework: Backend of its experiment; the hooks of the backend come last.

    Raises:
        UsageError: A hook cannot be read, or has an invalid declaration.
    """
    limit_s = time_limit(environ)
    roots = [root for root in list_hook_folders(environ) if os.path.isdir(root)]
    if not roots:
        return ()
    words = (*task.split(), framework) if framework else tuple(task.split())
    num_names = len(task.split())
    folders = [
        folder
        for level in _list_levels(words, starts_workers)
        for folder in _list_level_folders(level, roots, num_names)
    ]
    found = [
        (depth, path.name, action)
        for depth, folder, default_s in folders
        for stage, path in _list_files(folder)
        for action in _make_actions(path, stage, default_s)
    ]
    found.sort(
        key=lambda item: (STAGES.index(item[2].stage), item[0], build_sort_key(item[1]))
    )  # stable: places keep order
    return tuple(structs.replace(each, timeout_s=limit_s or each.timeout_s) for _, _, each in found)


def plan_patch_files(files: Sequence[str], environ: Mapping[str, str]) -> tuple[Action, ...]:
    """The patch files in their order, as actions of every node.

    Raises:
        UsageError: A file is missing, or is not a script.
    """
    limit_s = time_limit(environ)
    found = [read_declaration(_find_script(file), "patch") for file in files]
    return tuple(structs.replace(each, timeout_s=limit_s or each.timeout_s) for each in found)


def list_hook_folders(environ: Mapping[str, str]) -> list[Path]:
    """Folders of hooks, the most general first, each once."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "~"), ".config")
    plug_ins = [os.path.join(root, "hooks") for root in environ.get("PRIMUS_PLUGINS", "").split(os.pathsep) if root]
    own = [root for root in environ.get("PRIMUS_HOOKS", "").split(os.pathsep) if root]
    named = [os.path.join(home, "primus", "hooks"), *plug_ins, *own, CHECKOUT_HOOKS, "hooks"]
    found = [Path(os.path.expanduser(place)) for place in named]  # leaves ~ unexpanded without a home directory
    return list({os.path.realpath(place): place for place in found}.values())


def list_source_folders(environ: Mapping[str, str]) -> list[Path]:
    """Folders of the user's plug-ins and hooks, none inside of another."""
    plug_ins = [Path(os.path.expanduser(root)) for root in environ.get("PRIMUS_PLUGINS", "").split(os.pathsep) if root]
    hooks = [folder for folder in list_hook_folders(environ) if not any(map(folder.is_relative_to, plug_ins))]
    return [folder for folder in (*plug_ins, *hooks) if os.path.isdir(folder)]


def has_primus_runner(root: Path) -> bool:
    """Whether a folder of hooks belongs to an AMD-AGI/Primus checkout."""
    return os.path.isfile(root.resolve().parent / PRIMUS_RUNNER)  # False if this user may not enter the folder


def is_primus_hook(file: Path) -> bool:
    """Whether a hook belongs to an AMD-AGI/Primus checkout."""
    return _find_primus_folder(file) is not None


def _find_primus_folder(file: Path) -> Path | None:
    return next((folder for folder in file.resolve().parents if has_primus_runner(folder)), None)


def build_primus_variables(file: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Additional variables that hooks of AMD-AGI/Primus read; none if `file` is not such a hook.

    Source: AMD-AGI/Primus runner/helpers/envs/base_env.sh, which its launcher reads before the hooks.
    """
    root = _find_primus_folder(file)
    if root is None:
        return {}
    path = root.parents[2]  # of runner/helpers/hooks
    modules = path.parent if (path / "__init__.py").is_file() else path  # installed, or a checkout
    found = os.pathsep.join(filter(None, (str(modules), environ.get("PYTHONPATH"))))
    data = environ.get("DATA_PATH") or str(path / "data")
    return {"PRIMUS_PATH": str(path), "PRIMUS_IMPORT_ROOT": str(modules), "PYTHONPATH": found, "DATA_PATH": data}


def time_limit(environ: Mapping[str, str]) -> float | None:
    """Time limit in seconds that the user sets for every script; None if each has its own limit.

    Raises:
        UsageError: The variable is not a number above 0.
    """
    text = environ.get(TIMEOUT_VARIABLE)
    return None if not text else parse_seconds(text, f"${TIMEOUT_VARIABLE}")


def read_declaration(path: Path, kind: str = "hook", timeout_s: float = TIMEOUT_S) -> Action:
    """Read the declaration of a script from its name and its first lines: `# primus: once, lock, timeout=60`.

    Raises:
        UsageError: It cannot be read, or its declaration is invalid.
    """
    action = Action(kind="patch" if kind == "patch" else "hook", file=str(path), timeout_s=timeout_s)
    if ".once." in path.name:
        action = structs.replace(action, once=True)
    for number, line in enumerate(itertools.islice(_read_script(path, kind).splitlines(), HEADER_LINES), start=1):
        marker = _MARKER.match(line)
        for word in re.split(r"[\s,]+", marker[1].strip()) if marker else ():
            action = _apply_marker(action, word, f"{path}:{number}")
    return action


def _apply_marker(action: Action, word: str, where: str) -> Action:
    if word == "once":
        return structs.replace(action, once=True)
    if word == "lock":
        return structs.replace(action, locked=True)
    if word.startswith("timeout="):
        return structs.replace(action, timeout_s=parse_seconds(word.removeprefix("timeout="), where))
    raise UsageError(f"{where}: '# primus:' has no setting '{word}'", did_you_mean(word, MARKERS))


def _list_levels(words: tuple[str, ...], starts_workers: bool) -> list[tuple[int, tuple[str, ...]]]:
    """Folder names below a place, by depth: none, the task's, the subtask's, the framework's."""
    return [(depth, words[:depth]) for depth in range(0 if starts_workers else 1, len(words) + 1)]


def _list_level_folders(
    level: tuple[int, tuple[str, ...]], roots: list[Path], num_names: int
) -> Iterator[tuple[int, Path, float]]:
    """The folders of one level in all places, each with the time limit of its hooks; a `-` in a task's name may be
    written `_`.

    Args:
        level: Depth and folder names.
        roots: The places.
        num_names: Words in the task's name. AMD-AGI/Primus has no level below them: its folders of backends hold
            scripts that a hook of the task starts with arguments (train/pretrain/prepare_experiment.sh).
    """
    depth, words = level
    for root in roots:
        is_theirs = has_primus_runner(root)
        if depth > num_names and is_theirs:
            continue
        for spelled in dict.fromkeys([words, tuple(word.replace("-", "_") for word in words)]):
            yield depth, root.joinpath(*spelled), PRIMUS_TIMEOUT_S if is_theirs else TIMEOUT_S


def _list_files(folder: Path) -> Iterator[tuple[Stage, Path]]:
    stages: list[tuple[Stage, Path]] = [("before", folder), *((stage, folder / stage) for stage in STAGES)]
    for stage, sub in stages:
        for entry in _list_folder(sub):
            if _NAME.fullmatch(entry.name):
                yield stage, entry


def _list_folder(folder: Path) -> list[Path]:
    """Files of `folder`, and its broken links; empty if `folder` is not a folder that this user can reach.

    Raises:
        UsageError: It cannot be read.
    """
    if not os.path.isdir(folder):  # also below the home folder of another user, where Path.iterdir fails
        return []
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_file() or not entry.exists())
    except OSError as error:
        raise UsageError(f"hooks {folder}: {error.strerror}", "--no-hooks skips the hooks") from None


def _read_script(path: Path, kind: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        hint = "--no-hooks skips the hooks" if kind == "hook" else ""
        raise UsageError(f"{kind} {path}: cannot be read: {error.strerror}", hint) from None


def _make_actions(path: Path, stage: Stage, timeout_s: float) -> list[Action]:
    """The actions of one file: one for a script, one per stage and placement for a file of functions, none for a
    library."""
    plain = structs.replace(read_declaration(path, timeout_s=timeout_s), stage=stage)
    if path.suffix != ".py":
        return [plain]
    from primus.launch.hooks import decorated_functions  # imports `ast`, which shell scripts do not need

    text = _read_script(path, "hook")
    functions = decorated_functions.find_functions(path, text, plain)
    if not functions:
        return [] if decorated_functions.is_library(text) else [plain]
    return [
        structs.replace(like, functions=tuple(each.name for each in functions if each.action == like))
        for like in dict.fromkeys(each.action for each in functions)
    ]


def _find_script(file: str) -> Path:
    path = Path(os.path.expanduser(file))
    if path.suffix not in (".sh", ".py"):
        raise UsageError(f"--patch {file}: a patch must be a .sh or .py file")
    if not path.is_file():
        raise UsageError(f"--patch {file}: no such file")
    return path
