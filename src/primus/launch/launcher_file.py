"""Default options of the runtimes from launcher files; options of the command line take precedence.

Files of the site in /etc, those of the user, and the file of `primus-cli --config FILE` have a section for each
runtime; later ones override earlier ones:

    slurm: {partition: gpu, time: "2:00:00"}
    container: {options: {image: rocm/primus:v26.5, device: [/dev/kfd, /dev/dri]}}
    direct: {env: {NCCL_DEBUG: INFO}, patch: [fix.sh]}
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from primus import registry
from primus.errors import UsageError, did_you_mean
from primus.launch.command import NODE_END, SHORT, Command, is_runtime
from primus.redaction import redact_args
from primus.runtime import RUNTIMES, LaunchRequest, RequestSegment, Runtime

if TYPE_CHECKING:
    from primus.config import flags
    from primus.config.source import Leaf, Tree

SITE_FILE = "/etc/primus/launcher.yaml"
NAME = "primus/launcher.yaml"
"""Path of a launcher file in $XDG_CONFIG_DIRS and $XDG_CONFIG_HOME (XDG Base Directory Specification)."""
USER_FILE = "~/.primus.yaml"
VARIABLE = "PRIMUS_LAUNCHER_FILE"
"""Variable with the path of the user's launcher file, in place of the others of the user; empty disables them."""
GLOBALS = ("debug", "dry_run", "json")
"""Keys of the section `main`."""
CHECK_LAYOUT = "check_layout"
"""Key of `main` that adds ``--check layout`` to trainings that begin."""
NEW_RUN = ("--config", "--exp")
"""Options of `train` with the file of a new run."""
OTHER_NAMES = {"direct": {"gpus-per-node": "nproc"}}
"""Keys of AMD-AGI/Primus that are spelled differently here."""


class LauncherFileChoice(Struct, frozen=True):
    """Which launcher files are read."""

    given: str | None = None
    """File of --config."""
    is_off: bool = False
    """Whether none is read, because an outer launcher has already applied them."""


class Default(Struct, frozen=True):
    """An option with its values."""

    name: str
    """With dashes."""
    values: tuple[str, ...] | bool
    """A switch is on or off."""
    origin: str


def take_choice(words: Sequence[str]) -> tuple[list[str], LauncherFileChoice]:
    """`words` without the options that choose launcher files, and that choice; options of the task are kept.

    Raises:
        UsageError: --config has no value, or is repeated.
    """
    rest = list(words)
    kept: list[str] = []
    choice = LauncherFileChoice()
    is_head = True
    while rest:
        word = rest.pop(0)
        if word == "--no-config":
            choice = structs.replace(choice, is_off=True)
        elif word.partition("=")[0] == "--config":
            file = word.partition("=")[2] or (rest.pop(0) if rest and "=" not in word else "")
            if not file or file == "--":
                raise UsageError("--config needs a file", "primus-cli --config FILE <runtime> -- <task>")
            if choice.given not in (None, file):
                raise UsageError(f"--config is given twice: {choice.given} and {file}", "remove one of them")
            choice = structs.replace(choice, given=file)
        else:
            kept.append(word)
            if is_head and not word.startswith("-") and not is_runtime(word):
                return [*kept, *rest], choice  # the task, which may have its own option --config
            is_head = word == "--" or (is_head and word.startswith("-"))
    return kept, choice


def apply_defaults(command: Command, choice: LauncherFileChoice, environ: Mapping[str, str]) -> Command:
    """`command` with the defaults of the launcher files in front of the typed options.

    Raises:
        UsageError: A file cannot be read, or has an unknown key.
    """
    sections = {} if choice.is_off else _merge_files(choice, environ)
    if not sections:
        return command
    given = {name: True for name in GLOBALS if _is_on(sections.get("main", {}), name)}
    runtimes, notes = [], []
    for segment in _complete_chain(command.request, sections):
        new = _find_new_defaults(segment, sections.get(segment.name, {}))
        position = next((i for i, word in enumerate(segment.words) if word.startswith("-")), len(segment.words))
        added = [word for default in new for word in _format_words(segment.name, default)]
        words = (*segment.words[:position], *added, *segment.words[position:])
        runtimes.append(RequestSegment(segment.name, words))
        notes += [
            f"{segment.name}: {' '.join(redact_args(_format_words(segment.name, each)))}, {each.origin}" for each in new
        ]
    words = command.request.words
    typed = {word.partition("=")[0] for word in words}
    is_new = command.request.task.startswith("train ") and not typed.isdisjoint(NEW_RUN) and "--check" not in typed
    if is_new and _is_on(sections.get("main", {}), CHECK_LAYOUT):
        words = ("--check", "layout", *words)
        notes.append(f"train: --check layout, {sections['main'][CHECK_LAYOUT.replace('_', '-')].origin}")
    return structs.replace(
        command,
        options=structs.replace(command.options, **given, no_config=True),
        request=structs.replace(command.request, runtimes=tuple(runtimes), words=words),
        notes=(*command.notes, *notes),
    )


def _merge_files(choice: LauncherFileChoice, environ: Mapping[str, str]) -> dict[str, dict[str, Leaf]]:
    """Leaves by section and option; a key of the later file replaces that of the earlier."""
    sections: dict[str, dict[str, Leaf]] = {}
    for path, shown in _list_files(choice, environ):
        from primus.config import source  # loads a YAML reader, which is needed only if there is a file

        content: Tree = source.read_yaml(path, environ, shown, may_be_empty=True)
        for name, tree in content.items():
            section, options = _find_section(name, tree, shown)
            sections.setdefault(section, {}).update(_flatten_section(section, options, source.Leaf))
    return sections


def _list_files(choice: LauncherFileChoice, environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Path of each file that exists, and what messages call it; later ones override earlier ones."""
    site = [folder for folder in environ.get("XDG_CONFIG_DIRS", "").split(os.pathsep) if folder] or ["/etc/xdg"]
    standard = [SITE_FILE, *(f"{folder}/{NAME}" for folder in reversed(site))]
    own = environ.get(VARIABLE)
    if own is None:
        standard += [f"{environ.get('XDG_CONFIG_HOME') or '~/.config'}/{NAME}", USER_FILE]
    home = environ.get("HOME") or os.path.expanduser("~")
    for shown in [*standard, own] if own else standard:
        path = Path(shown.replace("~", home, 1) if shown.startswith("~/") else shown)
        if _is_file(path, shown, is_named=shown == own):
            yield path, shown
    if choice.given:
        yield Path(choice.given), choice.given


def _is_file(path: Path, shown: str, *, is_named: bool) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        if isinstance(error, PermissionError) and not is_named:
            return False  # the home folder is that of another user, as in containers that are started with --user
        raise UsageError(f"{shown}: cannot be read: {error.strerror}", "--no-config skips the launcher files") from None


def _find_section(name: str, tree: Leaf | Tree, shown: str) -> tuple[str, Tree]:
    """Name of a section, and its options."""
    known = ["main", *registry.list_plug_ins("runtimes")]
    section = SHORT.get(name, name.replace("_", "-"))
    if section not in known:
        raise UsageError(f"{_find_origin(tree) or shown}: unknown section '{name}'", did_you_mean(name, known))
    if not isinstance(tree, dict):
        raise UsageError(f"{tree.origin}: section '{name}' must be a mapping of options", "write KEY: VALUE below it")
    return section, tree


def _find_origin(tree: Any) -> str:
    """File and line of the first value of `tree`."""
    while isinstance(tree, dict):
        if not tree:
            return ""
        tree = next(iter(tree.values()))
    return str(tree.origin)


def _flatten_section(section: str, tree: Mapping[str, Any], make_leaf: type[Leaf]) -> dict[str, Leaf]:
    """Leaves by option; a mapping `options` is merged into its section, and `env` may be a mapping."""
    found: dict[str, Leaf] = {}
    for key, value in tree.items():
        name = key.replace("_", "-")
        name = OTHER_NAMES.get(section, {}).get(name, name)
        if key == "options" and not isinstance(value, dict):
            raise UsageError(
                f"{value.origin}: '{section}.options' must be a mapping of options", "write KEY: VALUE below it"
            )
        if not isinstance(value, dict):
            found[name] = value
        elif key == "options":
            found |= _flatten_section(section, value, make_leaf)
        elif key == "env":
            found[name] = make_leaf(
                [f"{each}={_format_scalar(item)}" for each, item in value.items()], _find_origin(value)
            )
        else:
            raise UsageError(
                f"{_find_origin(value)}: '{section}.{key}' must be a value, not a mapping", "write one value, or a list"
            )
    if section == "main":
        for name, item in found.items():
            if name.replace("-", "_") not in (*GLOBALS, CHECK_LAYOUT):
                known = (*GLOBALS, CHECK_LAYOUT)
                raise UsageError(f"{item.origin}: unknown key 'main.{name}'", did_you_mean(name, known))
    return found


def _is_on(section: Mapping[str, Any], name: str) -> bool:
    item = section.get(name.replace("_", "-"))
    if item is None or isinstance(item.value, bool | None):
        return bool(item and item.value)
    raise UsageError(f"{item.origin}: 'main.{name}' must be true or false")


def _complete_chain(request: LaunchRequest, sections: Mapping[str, Any]) -> tuple[RequestSegment, ...]:
    """The runtimes, with the default last runtime added if it has defaults and was not typed."""
    last = registry.load_plug_in(RUNTIMES, request.runtimes[-1].name)
    if last.LEVEL != "node" and request.task and sections.get(NODE_END):
        return (*request.runtimes, RequestSegment(NODE_END))
    return request.runtimes


def _find_new_defaults(segment: RequestSegment, section: Mapping[str, Any]) -> list[Default]:
    """Defaults of the runtime that its words do not override; values of repeatable options accumulate."""
    if not section:
        return []
    from primus.config import flags

    module = registry.load_plug_in(RUNTIMES, segment.name)
    own = {name: flag for flag in flags.list_flags(module.Options) for name in flag.names}
    spellings = {**{name: _spell_out_flag(flag) for name, flag in own.items()}, **(module.SPELLINGS or {})}
    typed = {_normalize_option(word, spellings) for word in segment.words if word.startswith("-")}
    new = []
    for key, item in section.items():
        name = spellings.get(f"--{key}", f"--{key}")
        if item.value is None:
            continue
        _check_known(segment.name, key, item, spellings, module)
        if not module.accepts_option(segment.words, name):
            continue
        flag = own.get(name)
        is_repeated = isinstance(item.value, list) and (flag.is_list if flag else module.SPELLINGS is None)
        if name in typed and not is_repeated:
            continue
        new.append(Default(name, _convert_values(name, item, flag, module), item.origin))
    return new


def _spell_out_flag(flag: flags.Flag) -> str:
    return next((name for name in flag.names if name.startswith("--")), flag.names[0])


def _normalize_option(word: str, spellings: Mapping[str, str]) -> str:
    """The long name of an option as it was typed: --nodes=2, --NODES_X, -N2, --no-hooks."""
    name = word.partition("=")[0]
    name = name.replace("_", "-") if name.startswith("--") else name[:2]
    positive = f"--{name.removeprefix('--no-')}"
    return spellings.get(name) or (positive if name.startswith("--no-") and positive in spellings else name)


def _check_known(runtime: str, key: str, item: Any, spellings: Mapping[str, str], module: Runtime) -> None:
    """Reject unknown keys; those of a container are not checked, because each engine has its own options."""
    is_open = module.parse and module.SPELLINGS is None and module.LEVEL == "container"
    if is_open or f"--{key}" in spellings:
        return
    names = [name.removeprefix("--") for name in spellings if name.startswith("--") and "_" not in name]
    raise UsageError(f"{item.origin}: unknown key '{runtime}.{key}'", did_you_mean(key, names))


def _convert_values(name: str, item: Any, flag: flags.Flag | None, module: Runtime) -> tuple[str, ...] | bool:
    value = item.value
    if isinstance(value, bool) and (flag is None or flag.is_switch):
        return value
    if not isinstance(value, list):
        return (_format_scalar(item),)
    texts = tuple(str(each) for each in value)
    if flag is not None and not flag.is_list:
        raise UsageError(f"{item.origin}: {name} takes one value, not a list")
    return (",".join(texts),) if flag is None and module.SPELLINGS is not None else texts


def _format_scalar(item: Any) -> str:
    """The scalar as written in the file."""
    return str(item.text or item.value) if not isinstance(item.value, str) else item.value


def _format_words(runtime: str, default: Default) -> list[str]:
    """The option as it would be typed; a pass-through option that is false is omitted."""
    if isinstance(default.values, tuple):
        return [f"{default.name}={value}" for value in default.values]
    if default.values:
        return [default.name]
    from primus.config import flags

    names = {name for flag in flags.list_flags(registry.load_plug_in(RUNTIMES, runtime).Options) for name in flag.names}
    return [f"--no-{default.name.removeprefix('--')}"] if default.name in names else []
