"""An experiment file, its presets and the command line, merged into one resolved Experiment.

Later wins: defaults, model preset, trainer preset, experiment `overrides:`, command line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from primus import registry
from primus.config.overrides import parse_overrides
from primus.config.schema import GROUPS, OWNERS, Experiment, ExperimentFile, ModelSpec, ModuleFile, Stage, Trainer
from primus.config.source import Leaf, Tree, plain, read
from primus.errors import UsageError, did_you_mean

STAGES: tuple[str, ...] = get_args(Stage)
TOP_KEYS = ("work_group", "user_name", "exp_name", "workspace")
MODULE_KEYS = ("framework", "config", "model")
DEFAULT = "default"


class Resolved(Struct, frozen=True):
    """An experiment with the origin of each of its values."""

    experiment: Experiment
    origins: dict[str, str]
    """Origin by flat key; variables of `env:` as ``env.NAME``."""


def load_experiment(
    file: Path, overrides: Sequence[str] = (), *, environ: Mapping[str, str] | None, stage: str | None = None
) -> Resolved:
    """Resolve an experiment file.

    Args:
        file: The experiment's YAML.
        overrides: Words of the command line: ``--lr 1e-4``, ``--lr=1e-4``, ``lr=1e-4``, ``--flag``.
        environ: Values for ``${VAR}``; None leaves `${` as it stands.
        stage: Module to take; the file's only one when None.

    Raises:
        UsageError: Anything is wrong with the file, a preset or an override; all problems of one kind are listed.
    """
    tree = _extended(file, environ)
    _reject_unknown(tree, ExperimentFile.__struct_fields__, "experiment file")
    stage = stage or _only_stage(tree, file)
    top, flat = _split_overrides(parse_overrides(overrides, stage))
    module = _module(tree, stage, file)
    module |= {key: flat.pop(key) for key in MODULE_KEYS if key in flat}
    settings = _merge(_presets(module, file, environ), _subtree(module, "overrides"))
    settings = _merge(settings, flat)
    trainer, origins = _trainer(module, settings)
    return _experiment(file, tree, top, stage, trainer, origins)


def load_model(name: str, environ: Mapping[str, str] | None = None) -> ModelSpec:
    """The model preset `name` (a preset's name or a path), without any override.

    Raises:
        UsageError: There is no such preset, or it is not a valid model.
    """
    settings = _extended(_locate("models", Leaf(name, name, name), Path()), environ or {}, kind="models")
    _reject_unknown_settings(settings)
    spec: ModelSpec = _group("model", settings)[0]
    return spec


def _extended(
    file: Path, environ: Mapping[str, str] | None, kind: str | None = None, seen: tuple[Path, ...] = ()
) -> Tree:
    """Read `file` over the files that it extends; of these, later ones win."""
    path = file.resolve()
    if path in seen:
        raise UsageError(f"{file}: extends itself through {' -> '.join(p.name for p in seen)}")
    tree = read(file, environ, shown=_preset_name(path))
    extends = tree.pop("extends", None)
    merged: Tree = {}
    for leaf in _as_leaves(extends):
        base = _locate(kind, leaf, file.parent)
        merged = _merge(merged, _extended(base, environ, kind, (*seen, path)))
    return _merge(merged, tree)


def _preset_name(path: Path) -> str | None:
    return f"preset:{path.name}" if path.is_relative_to(registry.PACKAGE) else None


def _as_leaves(extends: Leaf | Tree | None) -> list[Leaf]:
    if extends is None:
        return []
    if not isinstance(extends, Leaf):
        raise UsageError(f"{_where(extends)}: 'extends' must be a file name or a list of them")
    if extends.value is None:
        return []
    names = extends.value if isinstance(extends.value, list) else [extends.value]
    return [Leaf(name, extends.origin, str(name)) for name in names]


def _locate(kind: str | None, name: Leaf, folder: Path) -> Path:
    """The file that `name` means: beside the file that names it, in the working directory, or a preset."""
    if not isinstance(name.value, str) or not name.value:
        raise UsageError(f"{name.origin}: expected the name of a file, got {name.value!r}")
    for candidate in (folder / name.value, Path(name.value)):
        if os.path.isfile(candidate):  # unlike Path.is_file, False for a name that is too long
            return candidate
    if kind is None or "/" in name.value:
        raise UsageError(f"{name.origin}: no such file: {name.value}")
    try:
        found = registry.path(kind, name.value)
    except UsageError as error:
        where = "" if name.origin == name.value else f"{name.origin}: "
        raise UsageError(f"{where}{error.problem}", error.hint) from None
    assert found is not None, "presets are files"
    return found


def _merge(base: Tree, over: Tree) -> Tree:
    """`over` on top of `base`: mappings merge, anything else replaces."""
    merged = dict(base)
    for key, item in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, item) if isinstance(below, dict) and isinstance(item, dict) else item
    return merged


def _split_overrides(typed: Tree) -> tuple[Tree, Tree]:
    """Overrides of the experiment's own keys, and of its module's."""
    own = (*TOP_KEYS, "env")
    return {k: v for k, v in typed.items() if k in own}, {k: v for k, v in typed.items() if k not in own}


def _only_stage(tree: Tree, file: Path) -> str:
    _reject_unknown_modules(tree)
    modules = list(_subtree(tree, "modules"))
    if len(modules) == 1:
        return modules[0]
    raise UsageError(
        f"{file}: 'modules:' must hold one of {', '.join(STAGES)}; it holds {', '.join(modules) or 'none'}"
    )


def _module(tree: Tree, stage: str, file: Path) -> Tree:
    _reject_unknown_modules(tree)
    modules = _subtree(tree, "modules")
    if stage not in modules:
        raise UsageError(f"{file}: no module '{stage}'", f"add 'modules: {{{stage}: {{framework, model, overrides}}}}'")
    module = _subtree(modules, stage)
    _reject_unknown(module, ModuleFile.__struct_fields__, f"module '{stage}'")
    if "model" not in module:
        raise UsageError(f"{file}: module '{stage}' names no model", "for example 'model: llama3.1_8B.yaml'")
    return dict(module)


def _reject_unknown_modules(tree: Tree) -> None:
    for name, item in _subtree(tree, "modules").items():
        if name not in STAGES:
            raise UsageError(f"{_where(item)}: unknown module '{name}'", did_you_mean(name, STAGES))


def _subtree(tree: Tree, key: str) -> Tree:
    item = tree.get(key, {})
    if isinstance(item, Leaf):
        if item.value is None:
            return {}
        raise UsageError(f"{item.origin}: '{key}' must hold keys and values, not {item.value!r}")
    return item


def _reject_unknown(tree: Tree, valid: Sequence[str], what: str, within: str = "overrides") -> None:
    for key, item in tree.items():
        if key in valid:
            continue
        hint = f"put it under '{within}:'" if key in OWNERS else did_you_mean(key, valid)
        raise UsageError(f"{_where(item)}: unknown key '{key}' in the {what}", hint)


def _where(item: Leaf | Tree) -> str:
    """Origin of a value; of a mapping, that of the first value in it."""
    while not isinstance(item, Leaf):
        if not item:
            return "experiment"
        item = next(iter(item.values()))
    return item.origin


def _presets(module: Tree, file: Path, environ: Mapping[str, str] | None) -> Tree:
    """The model preset with the trainer preset over it."""
    settings: Tree = {}
    for key, kind in (("model", "models"), ("config", "trainers")):
        name = module.get(key)
        if isinstance(name, dict):
            raise UsageError(
                f"{_where(name)}: '{key}' must be the name of a preset", "its values go under 'overrides:'"
            )
        if name is not None and name.value is not None:
            settings = _merge(settings, _extended(_locate(kind, name, file.parent), environ, kind))
    return settings


def _trainer(module: Tree, settings: Tree) -> tuple[Trainer, dict[str, str]]:
    _reject_unknown_settings(settings)
    origins: dict[str, str] = {}
    groups: dict[str, Any] = {}
    for group in GROUPS:
        groups[group], group_origins = _group(group, settings)
        origins |= group_origins
    framework = module.get("framework", Leaf("native", DEFAULT))
    if not isinstance(framework, Leaf):
        raise UsageError(f"{_where(framework)}: 'framework' must be the name of a backend")
    origins |= {"framework": framework.origin, "model": _where(module["model"])}
    backend_args = _subtree(settings, "backend_args")
    origins |= {f"backend_args.{key}": _where(item) for key, item in backend_args.items()}
    return Trainer(framework=str(framework.value), backend_args=plain(backend_args), **groups), origins


def _reject_unknown_settings(settings: Tree) -> None:
    problems = []
    for key, item in settings.items():
        if key in OWNERS or key == "backend_args":
            continue
        hint = "keys stand directly under 'overrides:', not in groups" if key in GROUPS else did_you_mean_key(key)
        problems.append(f"{_where(item)}: unknown key '{key}'" + (f"; {hint}" if hint else ""))
    if problems:
        raise UsageError("\n".join(problems), "keys of one backend alone go under 'backend_args:'")


def did_you_mean_key(key: str) -> str:
    """A hint for an unknown setting; nothing where no name is near, since there are a hundred."""
    hint = did_you_mean(key, [*OWNERS, *TOP_KEYS])
    return hint if hint.startswith("did") else ""


def _group(group: str, settings: Tree) -> tuple[Any, dict[str, str]]:
    """The group's Struct from the flat settings, and the origin of each field."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for field in msgspec.structs.fields(GROUPS[group]):
        item = settings.get(field.name)
        if item is None:
            origins[field.name] = DEFAULT
            if field.required:
                problems.append(f"the {group} preset lacks '{field.name}'")
            continue
        origins[field.name] = _where(item)
        try:
            values[field.name] = _converted(item, field.type)
        except msgspec.ValidationError as error:
            problems.append(f"{_where(item)}: {field.name}: {_conversion_problem(item, field.type, error)}")
    if problems:
        raise UsageError("\n".join(problems))
    return GROUPS[group](**values), origins


def _converted(item: Leaf | Tree, kind: Any) -> Any:
    """`item` as `kind`; an integral float is an integer, and typed text may be meant as a string."""
    if not isinstance(item, Leaf):
        return msgspec.convert(plain(item), kind)
    value = item.value
    if isinstance(value, float) and not math.isfinite(value):
        raise msgspec.ValidationError("expected a finite number")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise msgspec.ValidationError(f"expected int <= {_LARGEST}")
    candidates = [value]
    candidates += [int(value)] if isinstance(value, float) and value.is_integer() else []
    candidates += [item.text] if item.typed else []
    problem: msgspec.ValidationError | None = None
    for candidate in candidates:
        try:
            return msgspec.convert(candidate, kind)
        except msgspec.ValidationError as error:
            problem = problem or error
    assert problem
    raise problem


_LARGEST = 2**63 - 1
"""Largest integer of JSON readers and of tensors."""


def _conversion_problem(item: Leaf | Tree, kind: Any, error: msgspec.ValidationError) -> str:
    reason = str(error).replace("`", "").replace("Expected", "expected").split(" - at")[0]
    if not isinstance(item, Leaf):
        return f"{reason} (a mapping)"
    if reason.startswith("Invalid enum value"):
        choices = [choice for option in _alternatives(kind) for choice in get_args(option)]
        return f"{item.value!r} is not possible; {did_you_mean(str(item.value), choices)}"
    return f"{reason} ({item.value!r})"


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _experiment(file: Path, tree: Tree, top: Tree, stage: str, trainer: Trainer, origins: dict[str, str]) -> Resolved:
    fields = {field.name: field for field in msgspec.structs.fields(Experiment)}
    values: dict[str, Any] = {"exp_name": file.stem}
    for key in TOP_KEYS:
        item = top.get(key, tree.get(key))
        origins[key] = _where(item) if item is not None else DEFAULT
        if item is not None:
            try:
                values[key] = _converted(item, fields[key].type)
            except msgspec.ValidationError as error:
                raise UsageError(
                    f"{_where(item)}: {key}: {_conversion_problem(item, fields[key].type, error)}"
                ) from None
    env = _merge(_subtree(tree, "env"), _subtree(top, "env"))
    for name, item in env.items():
        if not isinstance(item, Leaf) or isinstance(item.value, list):
            raise UsageError(f"{_where(item)}: env.{name}: a variable's value must be a scalar")
        if not name or "=" in name or "\0" in name:
            raise UsageError(f"{_where(item)}: env: {name!r} is not the name of a variable")
        if "\0" in item.text:
            raise UsageError(f"{_where(item)}: env.{name}: a variable cannot hold a NUL character")
    origins |= {f"env.{name}": _where(item) for name, item in env.items()}
    values["env"] = {name: _variable(item) for name, item in env.items()}
    _check_name(values["exp_name"], origins["exp_name"])
    return Resolved(Experiment(stage=cast(Stage, stage), trainer=trainer, **values), dict(sorted(origins.items())))


def _variable(item: Leaf | Tree) -> str:
    assert isinstance(item, Leaf)
    return "" if item.value is None else item.text


def _check_name(exp_name: str, origin: str) -> None:
    """An experiment's name is one folder's name."""
    fits = 0 < len(os.fsencode(exp_name)) <= 200 and not set(exp_name) & set("/\0\n")
    if not fits or exp_name in (".", ".."):
        raise UsageError(
            f"{origin}: exp_name {exp_name!r} cannot name a folder", "use letters, digits, '.', '_' and '-'"
        )
