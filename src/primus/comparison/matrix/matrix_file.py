"""The matrix in a file, checked: a matrix of primus in YAML, or a config.env of tprimat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from primus import registry
from primus.comparison.matrix.matrix import (
    ENGINE_GROUP,
    FOREIGN_FRAMEWORKS,
    FRAMEWORK_ALIASES,
    PLATFORM_ALIASES,
    PLATFORMS,
    TUNABLE_KEYS,
    LoadedMatrix,
    MatrixPlatform,
    RivalMatrix,
    TunedClass,
    flatten_engine_settings,
)
from primus.comparison.matrix.tprimat_config import read_tprimat_matrix
from primus.config.schema import OWNERS
from primus.config.source import read_yaml, strip_origins
from primus.errors import UsageError, did_you_mean
from primus.framework import FRAMEWORKS
from primus.package_files import locate_config
from primus.redaction import redact_value

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")


def load_matrix(file: Path, environ: Mapping[str, str]) -> LoadedMatrix:
    """The matrix in a file: YAML, or a config.env of tprimat.

    Raises:
        UsageError: The file does not exist, or is not a matrix.
    """
    file = locate_config(file)
    if file.suffix == ".env":
        return _check_matrix(read_tprimat_matrix(file, environ))
    tree = strip_origins(read_yaml(file, environ))
    try:
        matrix = msgspec.convert(tree | {"name": tree.get("name") or file.stem}, RivalMatrix)
    except msgspec.ValidationError as error:
        raise _explain_error(error, tree, file) from None
    return _check_matrix(LoadedMatrix(matrix=matrix, file=file))


def _check_matrix(loaded: LoadedMatrix) -> LoadedMatrix:
    matrix, file = loaded.matrix, loaded.file
    if not NAME.fullmatch(matrix.name):
        raise UsageError(f"{file}: name: '{matrix.name}' is not the name of a folder", "use letters, digits and dashes")
    for what, found in (("platforms", matrix.platforms), ("frameworks", matrix.frameworks), ("models", matrix.models)):
        if not found:
            raise UsageError(f"{file}: {what}: empty", f"name at least one of the {what}")
    platforms = _rename_platforms(matrix, file)
    frameworks, refused = _rename_frameworks(matrix, file)
    matrix = structs.replace(matrix, platforms=platforms, frameworks=frameworks)
    for name, platform in platforms.items():
        _check_limits(platform.settings, TUNABLE_KEYS | {"device"}, f"{file}: platforms: {name}: settings")
        _check_variables(platform.env, f"{file}: platforms: {name}: env")
    _check_variables(matrix.env, f"{file}: env")
    _check_keys(matrix.settings, f"{file}: settings")
    if matrix.seeds and "seed" in matrix.settings:
        raise UsageError(f"{file}: both seeds: and settings: seed", "remove one of them")
    for name, model in matrix.models.items():
        if not NAME.fullmatch(name):
            raise UsageError(f"{file}: models: '{name}' cannot be part of a file name", "use letters, digits, . and -")
        _check_keys(model.settings, f"{file}: models: {name}: settings")
    if matrix.tuned:
        _check_tuned(matrix, matrix.tuned, file)
    notes = [*loaded.notes, *_list_order_notes(matrix)]
    return structs.replace(loaded, matrix=matrix, notes=tuple(notes), refused={**refused, **loaded.refused})


def _list_order_notes(matrix: RivalMatrix) -> list[str]:
    """The platforms whose cells do not alternate though the matrix asks for it."""
    others = [name for name, platform in matrix.platforms.items() if name != "cpu" or platform.runtime]
    if matrix.order != "alternating" or not others:
        return []
    return [f"order: alternating is for this machine's CPU; {', '.join(others)}: its cells run one after the other"]


def _rename_platforms(matrix: RivalMatrix, file: Path) -> dict[str, MatrixPlatform]:
    found = {}
    for name, platform in matrix.platforms.items():
        known = PLATFORM_ALIASES.get(name, name)
        if known not in PLATFORMS:
            raise UsageError(f"{file}: platforms: no platform '{name}'", did_you_mean(name, PLATFORMS))
        if known in found:
            raise UsageError(f"{file}: platforms: {known} is named twice", f"'{name}' is another name of {known}")
        found[known] = platform
    return found


def _rename_frameworks(matrix: RivalMatrix, file: Path) -> tuple[list[str], dict[str, str]]:
    """The frameworks by the names of primus, and those that cannot run with the reason."""
    found: list[str] = []
    refused: dict[str, str] = {}
    for name in matrix.frameworks:
        known = FRAMEWORK_ALIASES.get(name, name)
        if known in FOREIGN_FRAMEWORKS:
            refused[known] = FOREIGN_FRAMEWORKS[known]
        else:
            try:
                registry.find_plug_in_file(FRAMEWORKS.name, known)
            except UsageError as error:
                names = "" if "did you mean" in error.hint else f", {', '.join(FRAMEWORK_ALIASES)}"
                raise UsageError(f"{file}: frameworks: {error.problem}", error.hint + names) from None
        if known in found:
            hint = f"'{name}' is another name of {known}" if name != known else "repetitions: runs each cell again"
            raise UsageError(f"{file}: frameworks: {known} is named twice", hint)
        found.append(known)
    return found, refused


def _check_tuned(matrix: RivalMatrix, tuned: TunedClass, file: Path) -> None:
    """Check that each choice is within the limits of the matrix, and these within those of a fair comparison."""
    wrong = [key for key in tuned.may_change if key not in TUNABLE_KEYS]
    if wrong:
        raise UsageError(
            f"{file}: tuned: may_change: {wrong[0]} changes what is trained, not only its speed",
            f"a tuned side may choose {', '.join(sorted(TUNABLE_KEYS))}",
        )
    names = {
        "platform": (matrix.platforms, PLATFORM_ALIASES),
        "framework": (matrix.frameworks, FRAMEWORK_ALIASES),
        "model": (matrix.models, {}),
    }
    for number, choice in enumerate(tuned.choices, 1):
        where = f"{file}: tuned: choice {number}"
        for field, (known, aliases) in names.items():
            name = getattr(choice, field)
            if name is not None and aliases.get(name, name) not in known:
                raise UsageError(f"{where}: no {field} '{name}' in this matrix", did_you_mean(name, list(known)))
        _check_limits(choice.settings, frozenset(tuned.may_change), where)


def _check_limits(settings: Mapping[str, Any], allowed: frozenset[str], where: str) -> None:
    for key in flatten_engine_settings(settings):
        if key not in allowed and key.partition(".")[0] not in allowed:
            raise UsageError(f"{where}: {key} is not one of the settings that may differ", did_you_mean(key, allowed))


def _check_variables(env: Mapping[str, str], where: str) -> None:
    """Check that no variable is a secret, which the command of a cell would show."""
    for name, value in env.items():
        if redact_value(name, value) != value:
            raise UsageError(f"{where}: {name} is a secret", f"set it in the environment: export {name}=...")


def _check_keys(settings: Mapping[str, Any], where: str) -> None:
    if not isinstance(settings.get(ENGINE_GROUP) or {}, Mapping):
        raise UsageError(f"{where}: {ENGINE_GROUP}: must hold keys and values", f"{ENGINE_GROUP}: {{KEY: VALUE}}")
    for key in flatten_engine_settings(settings):
        if key not in OWNERS and key.partition(".")[0] not in (ENGINE_GROUP, "profile"):
            raise UsageError(f"{where}: unknown key '{key}'", did_you_mean(key, OWNERS))


def _explain_error(error: msgspec.ValidationError, tree: Mapping[str, Any], file: Path) -> UsageError:
    """An error of the conversion in the words of the file."""
    if "modules" in tree:
        return UsageError(
            f"{file}: this is an experiment, not a matrix", f"name it in a matrix: experiment: {file.name}"
        )
    text = str(error)
    match = re.fullmatch(r"Object (missing required|contains unknown) field `(\w+)`(?: - at `\$\.?(.*)`)?", text)
    if match is None:
        place = re.sub(r" - at `\$\.?(.*)`$", r": \1", text)
        return UsageError(f"{file}: {place}", "docs/compare-platforms.md describes the file")
    where = f"{file}: {match[3]}" if match[3] else str(file)
    if match[1] == "missing required":
        return UsageError(f"{where}: '{match[2]}' is missing", "docs/compare-platforms.md describes the file")
    known = RivalMatrix.__struct_fields__ if not match[3] else ()
    hint = did_you_mean(match[2], known) if known else "docs/compare-platforms.md describes the file"
    return UsageError(f"{where}: unknown key '{match[2]}'", hint)
