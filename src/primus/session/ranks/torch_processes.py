"""The processes of a training run: their device, their process groups, and the values that they exchange."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from primus.config.schema import Trainer
from primus.errors import PrimusError
from primus.machine.facts import DeviceKind
from primus.measure.devices.device import own_device, share_cores
from primus.runs.attempt import Attempt
from primus.session.ranks.engine_info import EngineInfo


@dataclass
class TorchProcesses:
    """The processes of torch.distributed: a `primus.session.ranks.processes.Processes`."""

    rank: int
    world: int
    device: torch.device
    """Device of this process."""
    timeout: timedelta
    """Time after which a collective counts as hung."""
    _writers: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce_max(self, value: int) -> int:
        """The largest `value` of all processes; every process must call it. The host waits for no device."""
        if self.world == 1:
            return value
        # On the host, so by gloo: a flag on the GPU would wait for all kernels that are queued.
        largest = torch.tensor(float(value))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest.item())

    def broadcast_from_first(self, value: Any) -> Any:
        """The first process's `value`, in every process."""
        if self.world == 1:
            return value
        values = [value]
        # Pickled, which is safe among the processes of one run.
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def all_gather_values(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Every process's `value` by rank, in every process."""
        if self.world == 1:
            return [value]
        # The writer group by default, since values are on the host and gloo needs no device. A thread passes its own
        # group.
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=group or self.writer_group)
        return values

    @property
    def writer_group(self) -> dist.ProcessGroup | None:
        """A group of all processes for the threads that write checkpoints while training communicates.

        Two threads must not use one group at a time: the order of their collectives would differ between processes.
        Creating a group is a collective itself, on first use: every process must get there in the same order. None
        for a single process.
        """
        if self._writers is None and self.world > 1:
            # gloo also on GPUs: the writer's tensors are copies on the host.
            self._writers = dist.new_group(backend="gloo", timeout=self.timeout)
        return self._writers


@contextmanager
def join_processes(
    rank: int, local_rank: int, world: int, timeout: timedelta, environ: Mapping[str, str], asked: DeviceKind = "auto"
) -> Iterator[TorchProcesses]:
    """Join the processes of the run for the duration of a `with`.

    Raises:
        UnfitError: No device is left for this process, or PyTorch cannot use those of the machine.
        PrimusError: The processes do not find each other.
    """
    device = own_device(local_rank, environ, asked)
    if world > 1:
        # Processes on this node, not of the run: nodes do not share cores.
        share_cores(environ, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        _init_process_group(device, timeout, environ)
    try:
        yield TorchProcesses(rank, world, device, timeout)
    finally:
        # Also after an error: the process leaves the group before it exits.
        if world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_run(attempt: Attempt, trainer: Trainer) -> AbstractContextManager[TorchProcesses]:
    """Join the processes of the run of `attempt` as its experiment says: see `join_processes`."""
    timeout = timedelta(minutes=trainer.parallel.distributed_timeout_minutes)
    place = (attempt.rank, attempt.local_rank, attempt.world_size)
    return join_processes(*place, timeout, os.environ, trainer.training.device)


@contextmanager
def join_single_process(processes: TorchProcesses) -> Iterator[None]:
    """A process group of one for the duration of a `with`, for engines whose meshes need a group."""
    if processes.world > 1:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if processes.device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed torch's generators; `deterministic` also forbids kernels whose result depends on timing.

    torch refuses an operation that has no such kernel, and cuBLAS needs the variable before its first use
    (pytorch.org/docs/stable/notes/randomness.html).
    """
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Raises at the first operation without a deterministic kernel, instead of giving other losses.
        torch.use_deterministic_algorithms(True)


def describe_torch_engine(
    processes: TorchProcesses, backend: str, library: str, version: str, data_size: int, *, compiles: bool = False
) -> EngineInfo:
    """An engine on PyTorch and its devices; the arguments are the fields of EngineInfo."""
    return EngineInfo(
        backend=backend,
        library=library,
        version=version,
        device_name=device_name(processes.device),
        device_type=processes.device.type,
        num_devices=processes.world,
        data_size=data_size,
        threads=torch.get_num_threads(),
        versions={} if library == "torch" else {"torch": str(torch.__version__)},
        compiles=compiles,
    )


def device_name(device: torch.device) -> str:
    """The name of a device's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:  # proc_cpuinfo(5)
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{platform.machine()} CPU"


def read_peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: allocated on its device, or resident if the host trains."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return read_peak_host_memory()


def read_peak_host_memory() -> int:
    """Peak resident memory of this process in bytes; ru_maxrss is in KiB on Linux (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def random_state(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """States of this process's random generators, under names that no other process uses."""
    states = {f"random.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"random.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, torch.Tensor], rank: int, device: torch.device) -> None:
    """Restore the random generators of this process from what `random_state` returned."""
    torch.set_rng_state(states[f"random.{rank}.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[f"random.{rank}.cuda"], device)


def _init_process_group(device: torch.device, timeout: timedelta, environ: Mapping[str, str]) -> None:
    """Use gloo for tensors of the host, and NCCL (RCCL on ROCm) for those of GPUs.

    Stop flags and checkpoints are exchanged by gloo also on GPUs, so that they never wait for the device's stream.
    """
    on_gpu = device.type == "cuda"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timeout, device_id=device if on_gpu else None
        )
    except (dist.DistError, ValueError) as error:
        where = f"{environ.get('MASTER_ADDR', '?')}:{environ.get('MASTER_PORT', '?')}"
        raise PrimusError(
            f"the processes did not find each other at {where}: {str(error).splitlines()[0]}",
            "check MASTER_ADDR and MASTER_PORT, that every node has started, and that no firewall is between them",
        ) from None
