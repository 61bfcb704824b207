"""torchtitan's messages, in the log of each rank."""

from __future__ import annotations

import logging
import os
import warnings

IGNORED_MESSAGES = (
    "torch.distributed is already initialized",  # by primus, with the timeout of the experiment
    "Peak flops undefined",  # primus knows the peak of each device model itself
    "Error running lspci",  # for the same purpose
    "Pipeline Parallel loss is not visible",  # primus reports the loss of the last stage in every process
    "initial_load_model_only=True has no effect",
)
"""Messages that say nothing about a run of primus."""
PACKAGE = f"{os.sep}torchtitan{os.sep}"


def write_engine_messages() -> None:
    """Write torchtitan's messages to standard error, which is the log of the rank, and warnings of other packages.

    torchtitan logs by the root logger, so that its messages are distinguished by their files.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("torchtitan: %(message)s"))
    handler.addFilter(_is_shown)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support on cpu")
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")


def _is_shown(record: logging.LogRecord) -> bool:
    is_wanted = PACKAGE in record.pathname or record.levelno >= logging.WARNING
    return is_wanted and not record.getMessage().startswith(IGNORED_MESSAGES)
