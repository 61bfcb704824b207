"""The matrix products of an experiment: those of a step on fake tensors."""

from __future__ import annotations

from pathlib import Path

from primus import experiment, registry
from primus.config.load import Resolved
from primus.errors import UnfitError, UsageError
from primus.framework import FRAMEWORKS
from primus.package_files import PROGRAM
from primus.task import TaskContext
from primus.tuning.gemm.options import GemmOptions
from primus.tuning.gemm.products import ProductList, multiply_counts, sort_products


def resolve_experiment(options: GemmOptions, context: TaskContext) -> Resolved:
    """The experiment with the overrides of the command."""
    assert options.config is not None
    return experiment.resolve_experiment(Path(options.config), context.overrides, context.environ)


def check_accelerators(options: GemmOptions, context: TaskContext) -> None:
    """Check that the experiment trains on AMD GPUs, whose libraries have tuners.

    Raises:
        UnfitError: It trains on other devices.
    """
    resolved = resolve_experiment(options, context)
    devices = context.facts().devices
    if resolved.experiment.trainer.training.device == "cpu" or not devices:
        raise UnfitError(
            "tune gemm has no tuner for the matrix products of CPUs",
            "compare variables of libraries in real steps: tune sweep --metric tokens_per_s --keys env.NAME=A,B",
        )
    if any(device.vendor != "amd" for device in devices):
        raise UnfitError(
            "no tuner supports the matrix products of NVIDIA GPUs: cuBLAS has none, and TunableOp needs ROCm",
            "compiled kernels: compile: true",
        )


def trace_products(options: GemmOptions, context: TaskContext) -> ProductList:
    """The products of a step on fake tensors of a GPU.

    Raises:
        UsageError: The framework has no such step.
        UnfitError: PyTorch is not installed.
    """
    try:
        from primus.tuning.gemm.product_recorder import ProductRecorder
    except ImportError as error:
        raise UnfitError(f"tune gemm needs PyTorch: {error}", f"{PROGRAM} setup installs it") from None
    asked = resolve_experiment(options, context).experiment
    backend = registry.load_plug_in(FRAMEWORKS, asked.trainer.framework)
    recorder = ProductRecorder()
    try:
        backend.run_fake_step(asked, "cuda", recorder)
    except NotImplementedError:
        raise UsageError(
            f"framework '{asked.trainer.framework}' has no step on fake tensors",
            "record a real step: --with tunableop --record; or log one by HIPBLASLT_LOG_MASK=32, then --shapes LOG",
        ) from None
    # The fake step is one micro batch of one process; a real step repeats its products by gradient accumulation.
    found = sort_products(recorder.counts, "a step on fake tensors")
    training = asked.trainer.training
    nproc = context.layout.nproc if context.layout else 1
    global_batch_size = training.global_batch_size or training.micro_batch_size * nproc
    return multiply_counts(found, max(1, global_batch_size // (training.micro_batch_size * nproc)))
