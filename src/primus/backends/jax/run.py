"""One process of a run that JAX trains: devices, processes, session, engine, and its errors in words."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from primus.config.schema import Experiment
from primus.errors import UnfitError
from primus.machine.accelerators import find_accelerators
from primus.machine.facts import DeviceKind
from primus.machine.probe import find_machine_root, probe
from primus.process import count_usable_cpus
from primus.runs.attempt import Attempt
from primus.session.engine_errors import build_memory_error
from primus.session.processes import OneProcess, Processes


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one process of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    trainer = experiment.trainer
    if trainer.training.deterministic:
        _append_flag("--xla_gpu_deterministic_ops=true")  # openxla.org/xla/determinism
    import_jax()
    has_accelerators = trainer.training.device != "cpu" and _has_accelerators()
    if trainer.training.device == "cpu":
        _hide_accelerators()
    timeout = timedelta(minutes=trainer.parallel.distributed_timeout_minutes)
    with _explain_errors(), _join_processes(attempt, timeout, has_accelerators) as processes:
        check_devices(trainer.training.device, has_accelerators)
        _train_with_session(experiment, attempt, processes)


def import_jax() -> None:
    """Import jax and optax; their own error is the reason if they cannot be imported.

    Raises:
        UnfitError: One of them cannot be imported.
    """
    try:
        import jax  # noqa: F401
        import optax  # noqa: F401
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnfitError(
            f"jax cannot be imported: {reason}",
            "./primus-cli setup --engine jax installs it; ./primus-cli engines shows what is installed",
        ) from error


def check_devices(asked: DeviceKind, has_accelerators: bool) -> None:
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


def _train_with_session(experiment: Experiment, attempt: Attempt, processes: Processes) -> None:
    import jax
    import optax

    from primus.backends.jax.engine import JaxEngine
    from primus.backends.jax.sharding import plan_layout
    from primus.session.loop import train_with_engine
    from primus.session.open_session import open_session
    from primus.session.session import EngineInfo

    trainer = experiment.trainer
    attempt.beat("init")
    layout = plan_layout(trainer.parallel, processes.rank, processes.world)
    info = EngineInfo(
        backend="jax",
        library="jax",
        version=jax.__version__,
        device_name=str(jax.devices()[0].device_kind),
        device_type=jax.default_backend(),
        num_devices=layout.mesh.size,
        data_size=layout.data_size,
        threads=count_usable_cpus(),
        versions={"optax": optax.__version__},
        compiles=True,
    )
    session = open_session(experiment, attempt, processes, info, os.environ)
    train_with_engine(session, JaxEngine(trainer, layout, session.data.eod_id))


@contextmanager
def _join_processes(attempt: Attempt, timeout: timedelta, has_accelerators: bool) -> Iterator[Processes]:
    """The processes of the run: those of torch.distributed for values on the host, and of jax.distributed."""
    if attempt.world_size == 1:
        yield OneProcess()
        return
    import jax

    from primus.session.torch_processes import join_processes

    place = (attempt.rank, attempt.local_rank, attempt.world_size)
    # On the host: JAX has the devices.
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
            yield processes
        finally:
            jax.distributed.shutdown()


def _choose_coordinator() -> str:
    """Address and free port of this node for JAX's coordinator; MASTER_PORT is torch's."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def _has_accelerators() -> bool:
    return bool(find_accelerators(probe(find_machine_root(os.environ), os.environ, tools="never")))


def _hide_accelerators() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _append_flag(flag: str) -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Turn JAX's errors about memory into errors that say what to do."""
    import jax

    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise build_memory_error(error) from error
