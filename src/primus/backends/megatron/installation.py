"""What is installed beside Megatron; imports neither."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from primus.engines.installation import find_installation
from primus.engines.requirement import read_engine
from primus.engines.site_folders import find_module_folder, list_import_folders

ENGINE = "megatron"
TRANSFORMER_ENGINE = "transformer_engine"


def find_transformer_engine(environ: Mapping[str, str]) -> bool | None:
    """Whether the interpreter that would train has Transformer Engine; None if this machine has no Megatron.

    The workers may run elsewhere, in an image: only they know.
    """
    found = find_installation(ENGINE, read_engine(ENGINE), environ)
    if found is None:
        return None
    if found.place == "main environment":
        return has_transformer_engine()
    folders = list_import_folders(Path(found.python).parent.parent)
    return find_module_folder(TRANSFORMER_ENGINE, folders) is not None


def has_transformer_engine() -> bool:
    """Whether this interpreter has Transformer Engine."""
    return find_spec(TRANSFORMER_ENGINE) is not None
