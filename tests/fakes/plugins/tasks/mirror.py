"""Write down what has arrived, for tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

from msgspec import Struct

from primus.config.flags import Positional
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `mirror`."""

    file: Positional
    """Where to write."""
    say: str = ""
    """A word that should arrive as it is."""


def run(options: Options, context: TaskContext) -> None:
    """Write the word, the variables and the folder."""
    values = {name: value for name, value in os.environ.items() if name.startswith("HOSTILE")}
    Path(options.file).write_text(json.dumps({"said": options.say, "variables": values, "folder": os.getcwd()}))
