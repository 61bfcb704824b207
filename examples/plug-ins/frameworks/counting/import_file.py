"""Read the files of `counting`: YAML with `counts`."""

from __future__ import annotations

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.foreign_file import ForeignFile

FORMATS = "a YAML file of counting"
MODEL = "mine_1B"


def read_file(file: ForeignFile) -> ForeignConfig | None:
    """The experiment of a file with `counts`; None if it has none."""
    if "counts" not in file.values:
        return None
    target = ForeignConfig(origin=f"file of counting {file.shown}", name=file.name, framework="counting")
    target.settings["model"] = MODEL
    for name, value in file.values.items():
        if name in ("counts", "stride"):
            target.set_key("train_iters" if name == "counts" else name, value)
        else:
            target.add_other(name, value, "counting has no such setting")
    return target
