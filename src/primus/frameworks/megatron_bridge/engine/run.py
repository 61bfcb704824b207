"""One rank of a run that Megatron-Bridge trains: processes, session, engine, and its errors in words."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version

from primus import registry
from primus.config.schema import Experiment
from primus.frameworks.megatron.backend_settings import group_settings, list_unused_settings
from primus.frameworks.megatron.engine.installation import has_transformer_engine, list_available
from primus.frameworks.megatron.engine.run import apply_cpu_patch, explain_errors
from primus.frameworks.megatron_bridge.settings import BridgeSettings, list_megatron_settings
from primus.frameworks.megatron_bridge.support import check_local_layers
from primus.patch import PATCHES
from primus.runs.attempt import Attempt
from primus.session.ranks.engine_errors import explain_import
from primus.session.settings.adapter_settings import read_settings
from primus.session.settings.number_formats import check_number_format

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
    from primus.session.ranks.torch_processes import (
        describe_torch_engine,
        device_name,
        join_run,
        join_single_process,
        seed_everything,
    )

    with explain_errors(), join_run(attempt, trainer) as processes:
        device = processes.device
        attempt.beat("init")
        if device.type == "cpu":
            apply_cpu_patch(os.environ)
        uses_transformer_engine = device.type == "cuda" and has_transformer_engine()
        _import_engine(uses_transformer_engine)
        check_number_format(trainer, device_name(device))
        if not uses_transformer_engine:
            check_local_layers(trainer)
        seed_everything(trainer.training.seed, trainer.training.deterministic)
        settings = read_settings(trainer.backend_args, BridgeSettings)
        others = list_megatron_settings(trainer.backend_args)
        available = list_available(device.type, uses_transformer_engine)
        unused = list_unused_settings(others, available)
        layers = "the layers of Transformer Engine" if uses_transformer_engine else "the layers of megatron-core"
        installed = version(PACKAGE)
        attempt.say(f"{PACKAGE} {installed} with megatron-core {version('megatron-core')}, with {layers}")
        if unused:
            attempt.say(f"backend_args without effect on {PACKAGE}: {', '.join(unused)}")
        data_size = data_parallel_size(trainer.parallel, attempt.world_size)
        on_gpu = device.type == "cuda"
        info = describe_torch_engine(processes, "megatron_bridge", PACKAGE, installed, data_size, compiles=on_gpu)
        session = open_session(experiment, attempt, processes, info, os.environ)
        attempt.beat("init")
        from primus.frameworks.megatron.engine.batches import BatchOptions
        from primus.frameworks.megatron_bridge.engine.driver import BridgeEngine

        options = BatchOptions(
            session.masked_token, trainer.data.reset_attention_mask, session.data.eod_id, uses_transformer_engine
        )
        with join_single_process(processes):
            extra = group_settings(others, available)
            engine = BridgeEngine(trainer, settings, device, session.global_batch_size, options, extra)
            train_with_engine(session, engine)


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
        with explain_import(PACKAGE, "megatron-bridge"):
            import megatron.bridge  # noqa: F401
    finally:
        logging.disable(logging.NOTSET)
