"""Processes that train by JAX: its devices, its coordinator, and its errors in words."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from primus.config.schema import Trainer
from primus.errors import UnfitError
from primus.machine.accelerators import find_accelerators
from primus.machine.facts import DeviceKind
from primus.machine.probe import find_machine_root, probe
from primus.process import count_usable_cpus
from primus.runs.attempt import Attempt
from primus.session.ranks.engine_errors import build_memory_error, explain_import
from primus.session.ranks.processes import OneProcess, Processes

if TYPE_CHECKING:
    from primus.session.ranks.engine_info import EngineInfo

KIB = 1 << 10


@contextmanager
def join_jax_run(attempt: Attempt, trainer: Trainer) -> Iterator[Processes]:
    """Import JAX, and join the processes of the run of `attempt` as its experiment says, for the duration of a `with`.

    Raises:
        UnfitError: JAX cannot be imported, or does not have the devices that the experiment asks for.
        PrimusError: The processes do not find each other; also, instead of JAX's own error, when memory runs out.
    """
    # In this order: XLA_FLAGS are set before jax starts, and jax.distributed.initialize precedes the first look at
    # devices, which fixes the platform.
    device = trainer.training.device
    _import_jax(trainer.training.deterministic)
    has_accelerators = _prepare_devices(device)
    timeout = timedelta(minutes=trainer.parallel.distributed_timeout_minutes)
    with _explain_jax_errors(), _join_jax_processes(attempt, timeout, device, has_accelerators) as processes:
        yield processes


def _import_jax(is_deterministic: bool) -> None:
    """Import jax and optax; their own error is the reason if they cannot be imported.

    Args:
        is_deterministic: Whether XLA must choose kernels whose results do not vary between runs.

    Raises:
        UnfitError: One of them cannot be imported.
    """
    if is_deterministic:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()  # openxla.org/xla/determinism
    with explain_import("jax", "jax"):
        import jax  # noqa: F401
        import optax  # noqa: F401


def _prepare_devices(asked: DeviceKind) -> bool:
    """Whether the machine has accelerators that the experiment may use; hides them from JAX if it must not."""
    if asked != "cpu":
        return bool(find_accelerators(probe(find_machine_root(os.environ), os.environ, tools="never")))
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    return False


def _check_devices(asked: DeviceKind, has_accelerators: bool) -> None:
    """Check that JAX has the devices that the experiment asks for.

    Raises:
        UnfitError: The machine has accelerators that JAX cannot use, or none although the experiment asks for them.
    """
    import jax

    if asked == "cpu" or any(device.platform != "cpu" for device in jax.local_devices()):
        return
    if has_accelerators:
        raise UnfitError(
            f"jax {jax.__version__} sees no accelerator of this machine",
            'install the plug-in of its kind in the environment of jax (pip install "jax[cuda13]" or'
            ' "jax[rocm7-local]"), or set device: cpu',
        )
    if asked == "cuda":
        raise UnfitError("device: cuda: this machine has no AMD or NVIDIA GPU", "set device: auto or cpu")


@contextmanager
def _join_jax_processes(
    attempt: Attempt, timeout: timedelta, device: DeviceKind, has_accelerators: bool
) -> Iterator[Processes]:
    """The processes of the run: those of torch.distributed for values on the host, and of jax.distributed.

    Raises:
        UnfitError: JAX does not have the devices that the experiment asks for.
    """
    if attempt.world_size == 1:
        _check_devices(device, has_accelerators)
        yield OneProcess()
        return
    import jax

    from primus.session.ranks.torch_processes import join_processes

    place = (attempt.rank, attempt.local_rank, attempt.world_size)
    # torch's group is for values on the host, since JAX has the devices. It also tells all processes JAX's address.
    with join_processes(*place, timeout, os.environ, "cpu") as processes:
        address: str = processes.broadcast_from_first(_choose_coordinator() if processes.is_first else "")
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=attempt.world_size,
            process_id=attempt.rank,
            local_device_ids=[attempt.local_rank] if has_accelerators else None,
            initialization_timeout=int(timeout.total_seconds()),
        )
        try:
            _check_devices(device, has_accelerators)
            yield processes
        finally:
            # A barrier of all processes: the first one holds JAX's coordinator, and must not exit before the others.
            jax.distributed.shutdown()


def _choose_coordinator() -> str:
    """Address and free port of this node for JAX's coordinator; MASTER_PORT is torch's."""
    # Free when the kernel chose it: another program may take it before JAX binds it. The launch then fails, and a
    # restart chooses another one.
    host = os.environ.get("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


@contextmanager
def _explain_jax_errors() -> Iterator[None]:
    """Turn JAX's errors about memory into errors that say what to do."""
    import jax

    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise build_memory_error(error) from error


def describe_jax_engine(backend: str, library: str, num_devices: int, data_size: int, other: str) -> EngineInfo:
    """The engine `library` on the devices that JAX has found; the version of the package `other` is reported too."""
    from importlib.metadata import version

    import jax

    from primus.session.ranks.engine_info import EngineInfo

    return EngineInfo(
        backend=backend,
        library=library,
        version=version(library),
        device_name=str(jax.devices()[0].device_kind),
        device_type=jax.default_backend(),
        num_devices=num_devices,
        data_size=data_size,
        threads=count_usable_cpus(),
        versions={other: version(other)},
        compiles=True,
    )


def read_peak_memory() -> int:
    """Peak memory of this process in bytes: allocated on its devices, or resident if the host trains."""
    import jax

    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in statistics if "peak_bytes_in_use" in each]
    # CPU devices keep no statistics; ru_maxrss is in KiB on Linux (getrusage(2)).
    return max(peaks, default=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB)
