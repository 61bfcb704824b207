"""Write what is known of Megatron-LM's arguments and Primus' keys, from checkouts of both.

    python tools/megatron_arguments.py --megatron MEGATRON_CHECKOUT --primus PRIMUS_CHECKOUT

The Megatron-LM checkout needs the tags of its releases; this Python needs torch. The facts are names, types, defaults
and choices, of the parser itself; meanings come from `megatron_meanings.py`.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.abc
import importlib.machinery
import json
import subprocess
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import megatron_meanings

TARGET = Path(__file__).parent.parent / "src/primus/frameworks/megatron"
VERSIONS = {
    "0.12": "core_v0.12.0",
    "0.13": "core_v0.13.0",
    "0.14": "core_v0.14.0",
    "0.15": "core_v0.15.0",
    "0.16": "core_v0.16.1",
    "0.17": "core_v0.17.0",
    "0.18": "core_v0.18.0",
    "0.19": "core_v0.19.0",
}
"""Tag of each release whose arguments are read. Primus 26.5 pins a commit between 0.16 and 0.17, which has no argument
that neither of them has."""
STUBBED = ("six", "triton")
"""Packages that arguments.py imports for code which the parser does not call."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--megatron", type=Path)
    options.add_argument("--primus", type=Path)
    options.add_argument("--parser", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.parser:
        print(json.dumps(list_parser_arguments(given.parser)))
        return
    if given.megatron:
        write_lines(TARGET / "arguments.json", {"versions": list(VERSIONS)}, merge_versions(given.megatron))
    if given.primus:
        arguments = json.loads((TARGET / "arguments.json").read_text())["keys"]
        keys = list_primus_keys(given.primus, arguments)
        write_lines(TARGET / "primus_keys.json", {"tokenizers": list_tokenizers()}, keys)


def merge_versions(checkout: Path) -> dict[str, dict[str, Any]]:
    """Arguments of all releases: the facts of the newest that has each, with the first and the last release."""
    merged: dict[str, dict[str, Any]] = {}
    for version, tag in VERSIONS.items():
        for found in read_release(checkout, tag):
            name = found.pop("name")
            known = merged.get(name, {})
            # An argument that a release repeats under another flag keeps its first one.
            if known.get("last") == version:
                continue
            merged[name] = found | {"first": known.get("first", version), "last": version}
    for name, found in merged.items():
        found["effect"] = find_argument_effect(name, found.pop("group"))
    return dict(sorted(merged.items()))


def read_release(checkout: Path, tag: str) -> list[dict[str, Any]]:
    """Arguments of one release, by the parser of its sources in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", checkout, "archive", tag, "megatron"], check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        command = [sys.executable, __file__, "--parser", folder]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: list[dict[str, Any]] = json.loads(listed.splitlines()[-1])
    return found


def list_parser_arguments(folder: Path) -> list[dict[str, Any]]:
    """Arguments that the parser of the sources in `folder` has."""
    if not hasattr(typing, "override"):  # new in Python 3.12, which the newest releases require
        typing.override = lambda method: method  # type: ignore[attr-defined]
    sys.meta_path.append(StubFinder())
    sys.path.insert(0, str(folder))
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return [
        describe_action(action, group.title or "")
        for group in parser._action_groups
        for action in group._group_actions
        if action.dest != "help"
    ]


def describe_action(action: argparse.Action, group: str) -> dict[str, Any]:
    """The facts of one argument."""
    kinds = {int: "int", float: "float", bool: "bool", str: "str", None: "str"}
    is_switch = action.nargs == 0
    found: dict[str, Any] = {
        "name": action.dest,
        "flags": list(action.option_strings),
        "kind": "switch" if is_switch else kinds.get(action.type, "text"),  # type: ignore[arg-type]
        "default": make_plain(action.default),
        "group": group,
    }
    if is_switch and action.const is False:
        found["stores"] = False
    if not is_switch and action.nargs is not None:
        found["nargs"] = action.nargs
    if action.choices:
        found["choices"] = [make_plain(choice) for choice in action.choices]
    return found


def make_plain(value: Any) -> Any:
    """`value` as JSON: an enumeration by its name, anything else as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return getattr(value, "name", value)
    return (
        [make_plain(item) for item in value] if isinstance(value, list | tuple) else getattr(value, "name", str(value))
    )


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules for packages that are not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_stubbed = name.split(".")[0] in STUBBED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stubbed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class StubModule(types.ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **options: None})


def list_primus_keys(checkout: Path, arguments: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Keys of Primus' Megatron presets that are no arguments of Megatron-LM, with the default of the lowest preset."""
    keys: dict[str, dict[str, Any]] = {
        name: {"default": default} for name, default in megatron_meanings.PRIMUS_DEFAULTS.items()
    }
    for file in sorted((checkout / "primus/configs").glob("m*s/megatron/*.yaml"), key=rank_preset):
        for name, value in yaml.safe_load(file.read_text()).items():
            if name in arguments or name in ("extends", "bases", "includes"):
                continue
            is_default = file.parent.parent.name == "modules" or file.stem in BASE_PRESETS
            found = keys.setdefault(name, {"default": value if is_default else None})
            if value != found["default"] and value not in found.setdefault("shipped", []):
                found["shipped"].append(value)
    for name, found in keys.items():
        found["effect"] = match_effect(name, megatron_meanings.PRIMUS_EFFECTS) or "numbers"
        if found["effect"] != "model" or not found.get("shipped"):
            found.pop("shipped", None)
    return dict(sorted(keys.items()))


BASE_PRESETS = ("primus_megatron_model", "language_model")
"""Model presets that all others extend: their values are defaults."""


def rank_preset(file: Path) -> tuple[bool, bool, str]:
    """Order in which presets state defaults: those that others extend come first."""
    return file.stem not in BASE_PRESETS, "extends:" in file.read_text(), file.name


def list_tokenizers() -> dict[str, int]:
    """Rows of the embedding of the models in our presets, by the name on the Hugging Face Hub."""
    from primus import registry
    from primus.config.extended_files import load_model

    specs = [load_model(name) for name in registry.list_plug_ins("models")]
    return {spec.hf_name: spec.vocab_size for spec in sorted(specs, key=lambda spec: spec.hf_name) if spec.hf_name}


def find_argument_effect(name: str, group: str) -> str:
    """The effect of an argument of Megatron-LM."""
    return match_effect(name, megatron_meanings.ARGUMENT_EFFECTS) or megatron_meanings.GROUP_EFFECTS[group]


def match_effect(name: str, table: dict[str, str]) -> str:
    """The effect whose longest pattern matches `name`; empty if none does."""
    found = [(pattern, effect) for effect, patterns in table.items() for pattern in patterns.split()]
    matches = [(len(pattern), effect) for pattern, effect in found if fnmatch.fnmatchcase(name, pattern)]
    return max(matches)[1] if matches else ""


def write_lines(file: Path, head: dict[str, Any], keys: dict[str, dict[str, Any]]) -> None:
    """Write JSON with one key a line, so that differences between releases are readable."""
    lines = [f"{json.dumps(name)}: {msgspec.json.encode(value).decode()}" for name, value in keys.items()]
    top = "".join(f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    file.write_text("{\n" + top + '"keys": {\n' + ",\n".join(lines) + "\n}\n}\n")


if __name__ == "__main__":
    main()
