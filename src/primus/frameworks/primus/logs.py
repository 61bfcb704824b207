"""Lines of Primus (AMD-AGI/Primus) with the Megatron backend: those of Megatron-LM with a prefix and more values.

Three generations: a fraction `mem usages`; pairs of this line and the average since the last reset; `(avg b)` instead
of the second of a pair. Memory in `GB` is GiB (bytes / 1024^3). Source: primus/modules/trainer of AMD-AGI/Primus.
"""

from __future__ import annotations

import re

from primus.frameworks.megatron.logs import MegatronReader
from primus.training_logs.line_layout import LineLayout

PREFIX = re.compile(rb"\[rank-\d+/(\d+)\]")
MARKS = re.compile(rb"\[rank-\d+/\d+\]|\bmem usages?\b|tokens per GPU|harmonic mean")


class PrimusReader(MegatronReader):
    """Primus with the Megatron backend."""

    NAME = "primus"
    TITLE = "Primus"
    PRECEDENCE = 2
    MEMORY = "of the device that is in use"

    @classmethod
    def recognizes(cls, line: bytes) -> bool:
        return MARKS.search(line) is not None

    def _find_layout(self, line: bytes, found: re.Match[bytes], end: int, start: int) -> LineLayout:
        prefix = PREFIX.search(line) if "world_size" not in self.settings else None
        if prefix:
            self.settings["world_size"] = prefix[1].decode()
        return super()._find_layout(line, found, end, start)


READER = PrimusReader
