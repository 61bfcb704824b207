"""One rank of a run that megatron-core trains: processes, session, engine, and its errors in words."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from primus import registry
from primus.config.schema import Experiment
from primus.errors import UnfitError, UsageError
from primus.frameworks.megatron.backend_settings import group_settings, list_unused_settings
from primus.frameworks.megatron.engine.installation import has_transformer_engine, list_available
from primus.frameworks.megatron.support import MegatronDriver, check_driver
from primus.patch import PATCHES, VARIABLE, list_chosen_names
from primus.runs.attempt import Attempt
from primus.session.ranks.engine_errors import explain_import, explain_torch_errors, find_reason

if TYPE_CHECKING:
    import torch

    from primus.frameworks.megatron.engine.driver import EngineParts

CPU_PATCH = "megatron-core-cpu"
PACKAGE = "megatron-core"


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    trainer = experiment.trainer
    with explain_import(PACKAGE, "megatron"):
        import megatron.core.transformer  # noqa: F401
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
        if device.type == "cpu":
            apply_cpu_patch(os.environ)
        driver = choose_driver(device.type)
        check_driver(trainer, driver, device_name(device))
        seed_everything(trainer.training.seed, trainer.training.deterministic)
        attempt.say(driver.format_choice())
        unused = list_unused_settings(trainer.backend_args, list_available(device.type, driver.uses_transformer_engine))
        if unused and driver.checkout is None:
            attempt.say(f"backend_args without effect on {PACKAGE}: {', '.join(unused)}")
        data_size = data_parallel_size(trainer.parallel, attempt.world_size)
        # megatron-core compiles its fused functions on GPUs (megatron/core/jit.py).
        on_gpu = device.type == "cuda"
        info = describe_torch_engine(processes, "megatron", PACKAGE, driver.version, data_size, compiles=on_gpu)
        order_samples = None
        if trainer.data.dataloader == "engine":
            from primus.frameworks.megatron.engine.gpt_dataset import order_by_engine

            order_samples = partial(order_by_engine, trainer, attempt.run.directory)
        session = open_session(experiment, attempt, processes, info, os.environ, order_samples=order_samples)
        attempt.beat("init")
        from primus.frameworks.megatron.engine.batches import BatchOptions
        from primus.frameworks.megatron.engine.driver import MegatronEngine

        options = BatchOptions(
            session.masked_token, trainer.data.reset_attention_mask, session.data.eod_id, driver.uses_transformer_engine
        )
        with join_single_process(processes):
            parts = _build_parts(experiment, driver, device, session.global_batch_size)
            engine = MegatronEngine(trainer, device, session.global_batch_size, options, parts)
            train_with_engine(session, engine)


def _build_parts(
    experiment: Experiment, driver: MegatronDriver, device: torch.device, global_batch_size: int
) -> EngineParts:
    """Model, optimizer and schedule, by the checkout of Megatron-LM if there is one."""
    if driver.checkout is not None:
        from primus.frameworks.megatron.engine.checkout import build_checkout_parts

        return build_checkout_parts(experiment, device, global_batch_size)
    from primus.frameworks.megatron.engine.driver import build_core_parts

    trainer = experiment.trainer
    return build_core_parts(
        trainer,
        device,
        global_batch_size,
        use_transformer_engine=driver.uses_transformer_engine,
        extra=group_settings(trainer.backend_args, list_available(device.type, driver.uses_transformer_engine)),
    )


def choose_driver(device_type: str) -> MegatronDriver:
    """The driver: a checkout of Megatron-LM if `megatron.training` can be imported, else megatron-core alone."""
    import megatron.core

    found = find_spec("megatron.training")
    folder = str(Path(found.origin).parents[2]) if found and found.origin else None
    return MegatronDriver(
        version=megatron.core.__version__,
        checkout=folder,
        uses_transformer_engine=device_type == "cuda" and has_transformer_engine(),
    )


def apply_cpu_patch(environ: Mapping[str, str]) -> None:
    """Apply the patch that a CPU needs; the worker has not done it on a machine with GPUs (`device: cpu`).

    Raises:
        UnfitError: The user has excluded the patch.
    """
    if CPU_PATCH not in list_chosen_names(environ)[0]:
        raise UnfitError(
            f"{PACKAGE} does not run on a CPU without the patch {CPU_PATCH}, which ${VARIABLE} excludes",
            f"unset {VARIABLE}, or train on GPUs",
        )
    registry.load_plug_in(PATCHES, CPU_PATCH).apply()


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn errors of megatron-core and PyTorch into errors that say what to do."""
    try:
        with explain_torch_errors():
            yield
    except (NotImplementedError, ValueError, AssertionError) as error:
        if not is_raised_by_engine(error):
            raise
        raise UsageError(
            f"megatron-core refuses the configuration: {find_reason(error)}",
            "docs/engine-megatron.md lists the layouts; the traceback is in the log of the rank",
        ) from error


def is_raised_by_engine(error: BaseException) -> bool:
    """Whether the innermost frame of the traceback is in megatron-core's files."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith("megatron.")
