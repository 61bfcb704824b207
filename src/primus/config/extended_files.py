"""Read a YAML file over the files that it extends, and merge their trees."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

from primus import package_files, registry
from primus.config.convert import find_origin, make_group
from primus.config.schema import OWNERS, ModelSpec
from primus.config.schema_keys import ALTERNATIVES
from primus.config.source import Leaf, Tree, read_yaml
from primus.config.text_file import MOST_BYTES
from primus.config.translation.foreign_settings import Translator
from primus.errors import UsageError


def load_extended_file(
    file: Path, environ: Mapping[str, str] | None, kind: str | None = None, translator: Translator | None = None
) -> Tree:
    """Read `file` over the files that it extends; of these, later ones win."""
    merged: Tree = {}
    for tree in read_extended_files(file, environ, kind):
        merged = override_tree(merged, translator.rename(tree) if translator else tree)
    return merged


def read_extended_files(
    file: Path, environ: Mapping[str, str] | None, kind: str | None = None, seen: tuple[Path, ...] = ()
) -> list[Tree]:
    """The files that `file` extends, those that it extends first, and `file` itself last."""
    path = Path(os.path.realpath(file))  # unlike Path.resolve(), of a ring of links, too: reading it says what is wrong
    if path in seen:
        raise UsageError(f"{file}: extends itself through {' -> '.join(p.name for p in seen)}")
    tree = read_yaml(file, environ, shown=_name_own_file(path))
    # `bases` and `includes` are older names in presets of Primus.
    names = [leaf for key in ("extends", "includes", "bases") for leaf in _as_leaves(tree.pop(key, None))]
    found: list[Tree] = []
    for leaf in names:
        found += read_extended_files(locate_file(kind, leaf, file.parent), environ, kind, (*seen, path))
    return [*found, tree]


def _name_own_file(path: Path) -> str | None:
    """What errors and origins call a file of the package; None for others."""
    if path.is_relative_to(package_files.EXAMPLES):
        return f"{package_files.EXAMPLE_PREFIX}{path.relative_to(package_files.EXAMPLES)}"
    return f"preset:{path.name}" if path.is_relative_to(registry.PACKAGE) else None


def extend_tree(base: Tree, over: Tree) -> Tree:
    """Merge a file `over` the one that it extends; its keys replace their alternatives at both levels."""
    merged = override_tree(base, over)
    modules, below, above = (tree.get("modules") for tree in (merged, base, over))
    if isinstance(modules, dict) and isinstance(below, dict) and isinstance(above, dict):
        for stage, module in modules.items():
            settings = [
                each.get("overrides") for each in (below.get(stage), above.get(stage)) if isinstance(each, dict)
            ]
            if isinstance(module, dict) and len(settings) == 2 and all(isinstance(each, dict) for each in settings):
                module["overrides"] = override_tree(*cast("list[Tree]", settings))
    return merged


def _as_leaves(extends: Leaf | Tree | None) -> list[Leaf]:
    if extends is None:
        return []
    if not isinstance(extends, Leaf):
        raise UsageError(f"{find_origin(extends)}: 'extends' must be a file name or a list of them")
    if extends.value is None:
        return []
    names = extends.value if isinstance(extends.value, list) else [extends.value]
    return [Leaf(name, extends.origin, str(name)) for name in names]


def locate_file(kind: str | None, name: Leaf, folder: Path) -> Path:
    """Find the file `name`: next to the file that refers to it, in the working directory, or among presets."""
    if not isinstance(name.value, str) or not name.value:
        raise UsageError(f"{name.origin}: expected the name of a file, got {name.value!r}")
    for candidate in (folder / name.value, Path(name.value)):
        if is_usable_file(candidate, kind):
            return candidate
    if kind is None or "/" in name.value:
        raise UsageError(f"{name.origin}: no such file: {name.value}")
    try:
        found = registry.find_plug_in_file(kind, name.value)
    except UsageError as error:
        where = "" if name.origin == name.value else f"{name.origin}: "
        raise UsageError(f"{where}{error.problem}", error.hint) from None
    assert found is not None, "presets are files"
    return found


def is_usable_file(path: Path, kind: str | None) -> bool:
    """Whether `path` is a file; as a preset, an experiment of the same name does not count."""
    if not os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
        return False
    if kind is None:
        return True
    with path.open("rb") as file:
        return re.search(rb"^modules[ \t]*:", file.read(MOST_BYTES), re.MULTILINE) is None


def merge_trees(base: Tree, over: Tree) -> Tree:
    """`over` on top of `base`: mappings merge, anything else replaces."""
    merged = dict(base)
    for key, item in over.items():
        below = merged.get(key)
        merged[key] = merge_trees(below, item) if isinstance(below, dict) and isinstance(item, dict) else item
    return merged


def override_tree(base: Tree, over: Tree) -> Tree:
    """`over` on top of `base`; a key replaces its alternatives, such as `min_lr` and `min_lr_ratio`."""
    replaced = {
        other
        for keys in ALTERNATIVES
        for key in keys
        if key in over and not _is_unset(over[key])
        for other in keys
        if other not in over
    }
    return merge_trees({key: item for key, item in base.items() if key not in replaced}, over)


def _is_unset(item: Leaf | Tree) -> bool:
    return isinstance(item, Leaf) and (item.value is None or item.value is False)


def load_model(name: str, environ: Mapping[str, str] | None = None) -> ModelSpec:
    """The model preset `name` (a preset's name or a path), without any override.

    Raises:
        UsageError: The preset does not exist, or is not a valid model.
    """
    settings = load_extended_file(locate_file("models", Leaf(name, name, name), Path()), environ or {}, kind="models")
    reject_unknown_settings(settings)
    spec: ModelSpec = make_group("model", settings)[0]
    return spec


def find_unknown_settings(settings: Tree, engine_keys: Collection[str]) -> Tree:
    """Settings with a key that neither the schema nor the framework has."""
    return {
        key: item
        for key, item in settings.items()
        if key not in OWNERS and key != "backend_args" and key not in engine_keys
    }


def reject_unknown_settings(
    settings: Tree, engine_keys: Collection[str] = (), translator: Translator | None = None
) -> None:
    """Refuse keys that neither the schema nor the framework has.

    Raises:
        UsageError: There are some; the message names the nearest valid ones.
    """
    unknown = find_unknown_settings(settings, engine_keys)
    if unknown:
        from primus.config.key_hints import build_unknown_keys_error  # imported only for errors

        foreign = translator.list_known_keys() if translator else ()
        raise build_unknown_keys_error(unknown, [*OWNERS, *engine_keys, *foreign])
