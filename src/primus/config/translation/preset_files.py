"""Presets of a Primus checkout: `primus/configs/{modules,models}/FRAMEWORK/NAME.yaml` above an experiment file."""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT_FOLDERS = {"models": "models", "trainers": "modules"}
"""Folder under primus/configs by the kind of preset."""


def find_checkout_preset(kind: str, framework: str, name: str, experiment_file: Path) -> Path | None:
    """The preset `name` of the Primus checkout that holds `experiment_file`; None without a checkout or preset."""
    folder = CHECKOUT_FOLDERS[kind]
    names = [name] if name.endswith((".yaml", ".yml")) else [f"{name}.yaml", name]
    for above in experiment_file.resolve().parents:
        presets = os.path.join(above, "primus", "configs", folder, framework)
        if os.path.isdir(presets):
            found = (os.path.join(presets, each) for each in names)
            return next((Path(file) for file in found if os.path.isfile(file)), None)
    return None
