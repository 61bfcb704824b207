"""One rank of a run that torchtitan trains: processes, session, engine, and its errors in words."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version

from primus.backends.torchtitan.layout import plan_layout
from primus.backends.torchtitan.support import check_for_cpu
from primus.config.schema import Experiment
from primus.errors import PrimusError, UnfitError, UsageError
from primus.runs.attempt import Attempt

HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Variables by which CUDA and HIP find no device."""


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    trainer = experiment.trainer
    if trainer.training.device == "cpu":
        # torchtitan takes whatever accelerator torch finds.
        os.environ.update(HIDDEN_GPUS)
    _import_engine()
    import torch

    from primus.backends.torchtitan.engine import TorchTitanEngine
    from primus.session.loop import train_with_engine
    from primus.session.session import EngineInfo, open_session
    from primus.session.torch_processes import device_name, join_processes

    layout = plan_layout(trainer.training, trainer.parallel, attempt.world_size)
    timeout = timedelta(minutes=trainer.parallel.distributed_timeout_minutes)
    place = (attempt.rank, attempt.local_rank, attempt.world_size)
    with explain_errors(), join_processes(*place, timeout, os.environ, trainer.training.device) as processes:
        on_cpu = processes.device.type == "cpu"
        if on_cpu:
            check_for_cpu(trainer)
        info = EngineInfo(
            backend="torchtitan",
            library="torchtitan",
            version=version("torchtitan"),
            device_name=device_name(processes.device),
            device_type=processes.device.type,
            num_devices=attempt.world_size,
            data_size=layout.data_size,
            threads=torch.get_num_threads(),
            versions={"torch": str(torch.__version__)},
        )
        session = open_session(experiment, attempt, processes, info, os.environ)
        with _join_single_process(attempt.world_size, on_cpu), _set_local_rank(attempt.local_rank):
            attempt.beat("init")
            engine = TorchTitanEngine(
                trainer,
                layout,
                folder=attempt.run.directory / "torchtitan",
                device=processes.device,
                eod_id=session.data.eod_id,
            )
            train_with_engine(session, engine)


def _import_engine() -> None:
    """Import torchtitan; its own error is the reason if it cannot be imported."""
    try:
        import torchtitan.trainer  # noqa: F401
    except Exception as error:  # a package that fails on import may raise anything
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        raise UnfitError(
            f"torchtitan cannot be imported: {reason}",
            "./primus-cli setup --engine torchtitan installs it; ./primus-cli engines shows what is installed",
        ) from error


@contextmanager
def _join_single_process(world: int, on_cpu: bool) -> Iterator[None]:
    """A process group of one, which torchtitan's meshes need."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if world > 1:
        yield
        return
    dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", rank=0, world_size=1, store=HashStore())
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _set_local_rank(local_rank: int) -> Iterator[None]:
    """Set the variable by which torchtitan chooses the device."""
    before: Mapping[str, str] = dict(os.environ)
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        if "LOCAL_RANK" not in before:
            del os.environ["LOCAL_RANK"]


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn errors of torchtitan and PyTorch into errors that say what to do."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _build_memory_error(error) from error
    except (NotImplementedError, ValueError, AssertionError) as error:
        if not is_raised_by_engine(error):
            raise
        raise UsageError(
            f"torchtitan refuses the configuration: {_find_reason(error)}",
            "docs/engine-torchtitan.md says which layouts it has; the traceback is in the log of the rank",
        ) from error
    except RuntimeError as error:
        if "allocate memory" in str(error):  # the message of the CPU allocator, c10/core/impl/alloc_cpu.cpp
            raise _build_memory_error(error) from error
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise PrimusError(
                f"torch.compile failed: {_find_reason(error)}", "set compile: false to train without it"
            ) from error
        raise


def is_raised_by_engine(error: BaseException) -> bool:
    """Whether the innermost frame of the traceback is in torchtitan's files."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith("torchtitan.")


def _find_reason(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else f"{type(error).__name__} at line {error.__traceback__.tb_lineno}"  # type: ignore[union-attr]


def _build_memory_error(error: BaseException) -> PrimusError:
    return PrimusError(
        f"out of memory: {_find_reason(error)}",
        "lower micro_batch_size (gradients then accumulate to the same global_batch_size) or seq_length,"
        " set recompute_activations: true, or share the model among more processes",
    )
