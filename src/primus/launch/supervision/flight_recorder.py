"""Variables of PyTorch's flight recorder, which records collectives, so that it can be dumped when ranks hang."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from primus.plan import Variable

PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
BUFFER_SIZE = "20000"
"""Collectives that each rank keeps; the recorder is off with the default of 0 in older versions of PyTorch."""
SOURCE = "supervision: the flight recorder is dumped when ranks hang"


def make_recorder_variables(directory: str, attempt: int, taken: Mapping[str, object]) -> dict[str, Variable]:
    """Variables of the recorder for an attempt of the run in `directory`, under their new and old names.

    Dumps go to the attempt's folder, the pipes that trigger them to a local file system: not every shared one has
    named pipes (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp). Variables in `taken` are not set.
    """
    dumps = str(Path(directory) / "logs" / f"attempt_{attempt}" / "fr" / "trace_")
    pipes = str(Path(os.sep, "tmp") / f"primus-{Path(directory).name}-{attempt}" / "fr_")
    # Newer versions of PyTorch read the names with FR, older ones only those with NCCL.
    values = {
        "TORCH_FR_BUFFER_SIZE": BUFFER_SIZE,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": BUFFER_SIZE,
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        **dict.fromkeys(DUMP_VARIABLES, dumps),
        PIPE_VARIABLE: pipes,
    }
    return {name: Variable(value, SOURCE) for name, value in values.items() if name not in taken}
