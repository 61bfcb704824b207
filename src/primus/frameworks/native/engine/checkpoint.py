"""Checkpoints of the native backend: the state of a run, written and read by torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus.checkpoint.folders import ADAPTER_FOLDER
from primus.checkpoint.formats.adapter import AdapterFiles
from primus.errors import PrimusError
from primus.frameworks.native.engine import state
from primus.frameworks.native.engine.model import Transformer
from primus.session.checkpoints.resume import ResumePoint
from primus.session.checkpoints.saver import WriteFiles, format_reason
from primus.session.ranks.torch_processes import TorchProcesses, random_state, set_random_state

OTHER_MODEL = (
    "train the model and optimizer of that run, in any layout; or choose another checkpoint (with finetune: true only"
    " its weights are read)"
)
State = dict[str, Tensor]
"""Tensors of a checkpoint by name; with several processes, weights are `state.StoredWeight`."""


def collect_current_state(
    model: Transformer, optimizer: torch.optim.Optimizer, processes: TorchProcesses, loss_scale: Tensor | None = None
) -> State:
    """Everything that a checkpoint holds, in place."""
    named = state.collect_weights(model) | state.collect_moments(model, optimizer)
    return named | _name_loss_scale(loss_scale) | random_state(processes.rank, processes.device)


def restore_state(
    start: ResumePoint,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    processes: TorchProcesses,
    loss_scale: Tensor | None = None,
) -> None:
    """Load the checkpoint into the model and, unless only its weights are wanted, the optimizer and the generators.

    The generators are restored only for the same number of processes; only the dropout of adapters draws from them.

    Raises:
        PrimusError: It cannot be read.
    """
    # The tensors are those of the model and the optimizer: reading fills them in place, sharded as they are here.
    named = state.collect_weights(model)
    random: State = {}
    moments: State = {}
    if not start.weights_only:
        moments = state.collect_moments(model, optimizer)
        scale = _name_loss_scale(loss_scale)
        # That of a run in another precision has none.
        named |= moments | (scale if has_all(start.folder, scale) else {})
        # Each process has saved its own generators, under its rank; a converted checkpoint has none.
        if start.manifest.world_size == processes.world:
            own = random_state(processes.rank, processes.device)
            random = own if has_all(start.folder, own) else {}
    read_state(named | random, start.folder, processes)
    if not start.weights_only:
        state.take_moments(model, optimizer, moments)
    if random:
        set_random_state(random, processes.rank, processes.device)


def _name_loss_scale(loss_scale: Tensor | None) -> State:
    return {} if loss_scale is None else {"loss_scale": loss_scale}


def prepare_files(
    tensors: State, is_async: bool, processes: TorchProcesses, adapter: AdapterFiles | None = None
) -> WriteFiles:
    """What writes `tensors`, and `adapter` for peft; with `is_async` a copy, which is complete when this returns."""
    write = partial(write_state, _copy_to_host(tensors) if is_async else tensors, processes=processes)
    if adapter is None or not processes.is_first:
        return write

    def write_both(folder: Path) -> None:
        write(folder)
        adapter.write(folder / ADAPTER_FOLDER)

    return write_both


def write_state(tensors: State, folder: Path, processes: TorchProcesses) -> None:
    """Write the tensors of all processes into `folder` and wait until they are on disk."""
    from torch.distributed.checkpoint.state_dict_saver import save

    alone = processes.world == 1
    _expect_one_process()
    save(tensors, checkpoint_id=folder, process_group=processes.writer_group, no_dist=alone)


def read_state(tensors: State, folder: Path, processes: TorchProcesses) -> None:
    """Fill `tensors`, sharded as they are here, from the checkpoint in `folder`.

    Raises:
        PrimusError: The checkpoint lacks one of them, or has another shape for it.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    alone = processes.world == 1
    _expect_one_process()
    try:
        load(tensors, checkpoint_id=folder, process_group=processes.writer_group, no_dist=alone)
    except CheckpointException as error:
        different = next(_list_differences(tensors, folder), None)
        if different is not None:
            raise PrimusError(f"{folder}: cannot be loaded: {different}", OTHER_MODEL) from None
        raise PrimusError(f"{folder}: cannot be loaded: {format_reason(error)}", "choose another checkpoint") from None


def _list_differences(tensors: State, folder: Path) -> Iterator[str]:
    """What a checkpoint lacks or has in another shape; any layout of the same model can load the rest."""
    with contextlib.suppress(Exception):  # unreadable metadata is the reason that the caller gives
        saved = _read_metadata(folder)
        for name, tensor in tensors.items():
            if name not in saved:
                yield f"it has no {name}"
            elif (shape := getattr(saved[name], "size", None)) is not None and shape != tensor.shape:
                yield f"{name} is {list(shape)} in it, and {list(tensor.shape)} in this model"


def has_all(folder: Path, names: Iterable[str]) -> bool:
    """Whether a checkpoint has an entry for each of these names."""
    return set(names) <= _read_metadata(folder).keys()


def _read_metadata(folder: Path) -> dict[str, Any]:
    """Shape and chunks of each tensor of a checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(str(folder)).read_metadata().state_dict_metadata


def _copy_to_host(tensors: State) -> State:
    """A copy in the host's memory, complete when this returns."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    local = {
        name: [piece.local for piece in each.pieces] if isinstance(each, state.StoredWeight) else each
        for name, each in tensors.items()
    }
    # Blocking, although the name says async: only the write after it is asynchronous.
    copied = BlockingAsyncStager().stage(local)
    assert isinstance(copied, dict)
    return {
        name: each.replace_pieces(copied[name]) if isinstance(each, state.StoredWeight) else copied[name]
        for name, each in tensors.items()
    }


def count_bytes(tensors: State) -> int:
    """Size of the tensors, whole, of the layers of this process."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _expect_one_process() -> None:
    """Silence the warning of torch.distributed.checkpoint about a missing process group."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
