"""Options and progress that the tasks for checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from primus.errors import UnfitError
from primus.package_files import PROGRAM
from primus.runs import store

if TYPE_CHECKING:
    from primus.checkpoint.formats.open import OpenedCheckpoint
    from primus.config.schema import ModelSpec


class SourceOptions(Struct, frozen=True, kw_only=True):
    """How a checkpoint is read."""

    workspace: str = "./output"
    """Folder that holds all run folders."""
    model: str | None = None
    """Model preset or its YAML file, if the checkpoint does not name its model."""
    trust_pickle: bool = False
    """Load pickles: pytorch_model.bin as tensors only; Megatron's older format, which may run code. Use it
    only for files that you trust."""


def load_spec(options: SourceOptions) -> ModelSpec | None:
    """The model of `--model`."""
    from primus.config.extended_files import load_model

    return load_model(options.model) if options.model else None


def open_source(given: str, options: SourceOptions) -> OpenedCheckpoint:
    """The checkpoint that a task was given.

    Raises:
        UnfitError: PyTorch is not installed.
        UsageError: The checkpoint does not exist.
        PrimusError: It is damaged.
    """
    check_torch()
    from primus.checkpoint.formats.open import open_checkpoint

    return open_checkpoint(find_place(given, options), load_spec(options), options.trust_pickle)


def find_place(given: str, options: SourceOptions) -> str:
    """The folder of the run that `given` names, or `given` where it is a path or a model of the hub.

    Raises:
        UsageError: It is neither, or several runs have a name that begins so.
    """
    return given if given.startswith("hf:") else store.find_place(given, Path(options.workspace))


def check_torch() -> None:
    """Refuse to start without PyTorch.

    Raises:
        UnfitError: It cannot be imported.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UnfitError(
            f"checkpoints need PyTorch, which cannot be imported: {error}",
            f"{PROGRAM} setup installs it",
        ) from None


@contextmanager
def show_progress(stage: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Progress on a terminal; gives the function that counts finished bytes."""
    from primus.data.shards.display import ProgressDisplay
    from primus.data.shards.workers import ShardProgress

    progress = ShardProgress(stage, total_bytes)
    with ProgressDisplay() as display:

        def report(num_bytes: int) -> None:
            progress.done_bytes += num_bytes
            display.show_progress(progress)

        yield report
