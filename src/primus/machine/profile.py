"""Device models, architectures and NICs: what each is, and the settings that it needs.

A model is a YAML file of `machine/profiles`, an architecture (or a vendor's base) one of `machine/architectures`, a
kind of NIC one of `machine/nics`; folders of `$PRIMUS_PLUGINS` add files or replace those of the same name. Settings
that apply under a condition name it with `when:`; `primus.machine.environment.precedence` decides which ones hold.

`extends:` in a model's or NIC's file takes over all keys of another file except those in NOT_INHERITED; mappings are
merged by key, and null removes a key. `extends:` in an architecture's file names the layer below it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from primus import registry
from primus.config.data_file import DataFile, convert_data, read_data_file
from primus.config.text_file import format_path
from primus.errors import UsageError, did_you_mean
from primus.machine.facts import Vendor
from primus.machine.profiles.checks import check_profile
from primus.machine.profiles.schema import (
    CORES_PER_PROCESS,
    MIB,
    Condition,
    Dtype,
    Floor,
    Library,
    LinkLayout,
    Nic,
    Profile,
    ProfileLayer,
    Setting,
)

__all__ = [
    "CORES_PER_PROCESS",
    "MIB",
    "Condition",
    "Dtype",
    "Floor",
    "Library",
    "LinkLayout",
    "Nic",
    "Profile",
    "ProfileLayer",
    "Setting",
    "find_peak_tflops",
    "find_profile",
    "find_profile_by_id",
    "find_profile_by_name",
    "format_typed_name",
    "list_architecture_layers",
    "list_layers",
    "load_all_profiles",
    "load_nic",
]

NOT_INHERITED = frozenset(
    {"model", "names", "device_ids", "source", "floors", "achieved", "vendor_ids", "name_prefixes"}
)
"""Keys that identify a device, or that were measured on it."""


@cache
def load_all_profiles() -> tuple[Profile, ...]:
    """Every known device model, checked.

    Raises:
        UsageError: A file is wrong, or its figures contradict each other.
    """
    return tuple(map(_load_profile, registry.list_plug_ins("profiles")))


@cache
def _load_profile(name: str) -> Profile:
    """The model in one file, checked."""
    files = _read_chain("profiles", name)
    profile = convert_data(_merge_files(files), Profile, files)
    shown = format_path(files[0].path)
    if format_typed_name(profile) != _format_typed_name(files[0].path.stem):
        hint = f"name it {format_typed_name(profile)}.yaml"
        raise UsageError(f"{shown}: the file describes the model '{profile.model}'", hint)
    if not files[0].path.is_relative_to(registry.PACKAGE):  # a test checks ours
        check_profile(profile, str(files[0].path))
    return profile


def _read_chain(kind: str, name: str) -> list[DataFile]:
    """The file of a plug-in and those that it extends, nearest first.

    Raises:
        UsageError: A file is wrong, or extends itself.
    """
    chain: list[DataFile] = []
    following: object = name
    while following is not None:
        path = _find_extended_file(kind, following, chain)
        if path in [file.path for file in chain]:
            raise UsageError(f"{format_path(path)}: extends: the file extends itself")
        chain.append(_read_file(path))
        following = chain[-1].values.get("extends")
    return chain


def _find_extended_file(kind: str, name: object, chain: list[DataFile]) -> Path:
    if not isinstance(name, str):
        raise UsageError(f"{format_path(chain[-1].path)}: extends: expected the name of one file without its suffix")
    try:
        return _find_file(kind, name)
    except UsageError as error:
        where = f"{format_path(chain[-1].path)}: extends: " if chain else ""
        raise UsageError(f"{where}{error.problem}", error.hint) from None


def _find_file(kind: str, name: str) -> Path:
    path = registry.find_plug_in_file(kind, name)
    if path is None:
        raise UsageError(f"{kind}: '{name}' is an entry point, not a YAML file", "put the file into $PRIMUS_PLUGINS")
    return path


@cache
def _read_file(path: Path) -> DataFile:
    """A data file; its settings without `source:` get that of the file."""
    file = read_data_file(path)
    settings = file.values.get("settings")
    for setting in settings.values() if isinstance(settings, dict) else ():
        if isinstance(setting, dict) and "source" in file.values:
            setting.setdefault("source", file.values["source"])
    return file


def _merge_files(files: list[DataFile]) -> dict[str, Any]:
    """The values of a chain of files; the first file has precedence."""
    merged: dict[str, Any] = {}
    for file in reversed(files):
        inherited = {key: value for key, value in merged.items() if key not in NOT_INHERITED}
        merged = inherited | {
            key: inherited[key] | value if isinstance(value, dict) and isinstance(inherited.get(key), dict) else value
            for key, value in file.values.items()
        }
    merged.pop("extends", None)
    return {key: _drop_nulls(value) for key, value in merged.items() if value is not None}


def _drop_nulls(value: Any) -> Any:
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def find_profile_by_id(vendor: Vendor, device_id: int) -> Profile | None:
    """The model of a PCI device, regardless of its marketing name; None if it is not known."""
    return _index_by_id().get((vendor, device_id))


def find_profile_by_name(text: str) -> Profile | None:
    """The model whose name occurs as whole words in the name from a driver or tool, the longest name first; None if
    there is none.

    `H20` is not in ``NVIDIA H200``, nor `B200` in ``GB200``; ``AMD Radeon Graphics`` matches no model.
    """
    words = f" {_normalize_name(text)} "
    return next((profile for name, profile in _index_by_name() if f" {name} " in words), None)


def find_profile(word: str) -> Profile:
    """The model by its typed name: ``mi355x``, ``a100-40gb``.

    Raises:
        UsageError: There is none; the message names the nearest.
    """
    files = {_format_typed_name(name): name for name in registry.list_plug_ins("profiles")}
    typed = _format_typed_name(word)
    if typed not in files:
        raise UsageError(f"unknown GPU model '{word}'", did_you_mean(typed, files))
    return _load_profile(files[typed])


def format_typed_name(profile: Profile) -> str:
    """The model as it is typed: lower case without spaces."""
    return _format_typed_name(profile.model)


def list_layers(profile: Profile) -> list[tuple[str, Mapping[str, Setting]]]:
    """Settings of the model by layer, lowest first: base, gpu, vendor, architecture, model."""
    own = (format_typed_name(profile), profile.settings)
    return [*list_architecture_layers(profile.architecture), own]


def list_architecture_layers(name: str) -> list[tuple[str, Mapping[str, Setting]]]:
    """Settings of an architecture by layer, lowest first; none if it is not known.

    Raises:
        UsageError: A file is wrong, a layer below does not exist, or the layers form a ring.
    """
    layers: list[tuple[str, Mapping[str, Setting]]] = []
    parent: str | None = name if name in registry.list_plug_ins("architectures") else None
    while parent:
        layer = _load_layer(parent)
        if layer.name in [label for label, _ in layers]:
            raise UsageError(f"architecture '{layer.name}' extends itself", "extend the layer below")
        layers.insert(0, (layer.name, layer.settings))
        parent = layer.parent
    return layers


@cache
def _load_layer(name: str) -> ProfileLayer:
    path = _find_file("architectures", name)
    file = _read_file(path)
    values = {key: value for key, value in file.values.items() if key != "extends"}
    return convert_data({"name": path.stem, "parent": file.values.get("extends"), **values}, ProfileLayer, [file])


@cache
def load_nic(kind: str) -> Nic | None:
    """The kind of NIC of that name; None if it is not known.

    Raises:
        UsageError: Its file is wrong.
    """
    if kind not in registry.list_plug_ins("nics"):
        return None
    files = _read_chain("nics", kind)
    return convert_data({"kind": kind, **_merge_files(files)}, Nic, files)


def find_peak_tflops(device_name: str, dtype: Dtype) -> float | None:
    """Dense peak of an undivided device by the name that torch gives it: one die of an MI250X; None if not known."""
    profile = None if "MIG" in _normalize_name(device_name).split() else find_profile_by_name(device_name)
    if profile is None or dtype not in profile.peaks:
        return None
    return profile.peaks[dtype] / profile.devices_per_gpu


@cache
def _index_by_id() -> dict[tuple[str, int], Profile]:
    return {(profile.vendor, number): profile for profile in load_all_profiles() for number in profile.device_ids}


@cache
def _index_by_name() -> list[tuple[str, Profile]]:
    """Names in upper case with their models, the longest first."""
    devices = [profile for profile in load_all_profiles() if profile.vendor != "cpu"]
    pairs = [(_normalize_name(name), profile) for profile in devices for name in (profile.model, *profile.names)]
    return sorted(pairs, key=lambda pair: -len(pair[0]))


def _normalize_name(text: str) -> str:
    return " ".join(re.split(r"[^A-Z0-9]+", text.upper())).strip()


def _format_typed_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
