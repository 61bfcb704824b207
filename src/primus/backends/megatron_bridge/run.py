"""One rank of a run that Megatron-Bridge trains: processes, session, engine, and its errors in words."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta
from importlib.metadata import version

from primus import registry
from primus.backends.megatron.backend_settings import group_settings, list_unused_settings
from primus.backends.megatron.installation import has_transformer_engine
from primus.backends.megatron.run import apply_cpu_patch, explain_errors
from primus.backends.megatron_bridge.settings import list_megatron_settings, read_settings
from primus.backends.megatron_bridge.support import check_local_layers
from primus.config.schema import Experiment
from primus.errors import UnfitError
from primus.patch import PATCHES
from primus.runs.attempt import Attempt
from primus.session.engine_errors import find_reason

PACKAGE = "megatron-bridge"
IMPORT_PATCH = "megatron-bridge-without-transformer-engine"


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    trainer = experiment.trainer
    from primus.config.checks import data_parallel_size
    from primus.session.loop import train_with_engine
    from primus.session.open_session import open_session
    from primus.session.torch_processes import describe_torch_engine, join_processes, seed_everything

    timeout = timedelta(minutes=trainer.parallel.distributed_timeout_minutes)
    place = (attempt.rank, attempt.local_rank, attempt.world_size)
    with explain_errors(), join_processes(*place, timeout, os.environ, trainer.training.device) as processes:
        device = processes.device
        attempt.beat("init")
        if device.type == "cpu":
            apply_cpu_patch(os.environ)
        uses_transformer_engine = device.type == "cuda" and has_transformer_engine()
        _import_engine(uses_transformer_engine)
        if not uses_transformer_engine:
            check_local_layers(trainer)
        seed_everything(trainer.training.seed, trainer.training.deterministic)
        settings = read_settings(trainer.backend_args)
        others = list_megatron_settings(trainer.backend_args)
        available = _list_available(device.type, uses_transformer_engine)
        unused = list_unused_settings(others, available)
        layers = "the layers of Transformer Engine" if uses_transformer_engine else "the layers of megatron-core"
        attempt.say(f"{PACKAGE} {version(PACKAGE)} with megatron-core {version('megatron-core')}, with {layers}")
        if unused:
            attempt.say(f"backend_args without effect on {PACKAGE}: {', '.join(unused)}")
        data_size = data_parallel_size(trainer.parallel, attempt.world_size)
        info = describe_torch_engine(
            processes,
            "megatron_bridge",
            PACKAGE,
            version(PACKAGE),
            data_size,
            compiles=device.type == "cuda",
        )
        session = open_session(experiment, attempt, processes, info, os.environ)
        attempt.beat("init")
        from primus.backends.megatron.batches import BatchOptions
        from primus.backends.megatron.engine import join_single_process
        from primus.backends.megatron_bridge.engine import BridgeEngine

        options = BatchOptions(
            session.masked_token, trainer.data.reset_attention_mask, session.data.eod_id, uses_transformer_engine
        )
        with join_single_process(device, attempt.world_size):
            extra = group_settings(others, available)
            engine = BridgeEngine(trainer, settings, device, session.global_batch_size, options, extra)
            train_with_engine(session, engine)


def _list_available(device_type: str, uses_transformer_engine: bool) -> list[str]:
    """What settings may need of this machine: see `MegatronSetting.needs`."""
    return [name for name, is_there in _needs(device_type, uses_transformer_engine) if is_there]


def _needs(device_type: str, uses_transformer_engine: bool) -> tuple[tuple[str, bool], ...]:
    return ("gpu", device_type == "cuda"), ("transformer_engine", uses_transformer_engine)


def _import_engine(has_engine_layers: bool) -> None:
    """Import Megatron-Bridge; its own error is the reason if it cannot be imported.

    Raises:
        UnfitError: It cannot be imported.
    """
    if not has_engine_layers:
        # The worker has applied it unless the machine has GPUs (`device: cpu`) or the user excludes it.
        registry.load_plug_in(PATCHES, IMPORT_PATCH).apply()
    # A line for each module that gets an adapter, and a traceback for each optional package that is missing.
    logging.getLogger("megatron.bridge").setLevel(logging.WARNING)
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about each optional package that is not installed
            import megatron.bridge  # noqa: F401
    except Exception as error:
        raise UnfitError(
            f"{PACKAGE} cannot be imported: {type(error).__name__}: {find_reason(error)}",
            "docs/engine-megatron-bridge.md lists the packages that it needs; ./primus-cli engines shows what is"
            " installed",
        ) from error
    finally:
        logging.disable(logging.NOTSET)
