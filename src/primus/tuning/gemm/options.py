"""Options of `tune gemm`, which its ways to tune share."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from primus.tuning.gemm import hipblaslt


class GemmOptions(Struct, frozen=True, kw_only=True):
    """Options of `tune gemm`."""

    config: Annotated[str | None, Meta(extra={"aliases": ("--exp",)})] = None
    """Experiment file whose matrix products are tuned."""
    record: bool = False
    """TunableOp records a step of a real run, as engines other than native require; by default, a step runs on fake
    tensors."""
    shapes: tuple[str, ...] = ()
    """Logs with products instead: of hipBLASLt (HIPBLASLT_LOG_MASK=32) or TunableOp."""
    steps: Annotated[int, Meta(ge=24)] = 120
    """Steps of the run that compares steps with and without tuned products."""
    workspace: str = "./output"
    """Folder of the results, below tune/."""
    tool: Annotated[Literal["auto", "hipblaslt", "tunableop"], Meta(extra={"aliases": ("--with",)})] = "auto"
    """Tuner on AMD GPUs: hipblaslt-bench, or PyTorch's TunableOp. auto takes TunableOp for its own records, and where
    hipblaslt-bench is not installed."""
    output: str | None = None
    """Tuning file to write, for HIPBLASLT_TUNING_OVERRIDE_FILE or PYTORCH_TUNABLEOP_FILENAME (default:
    output/tune/hipblaslt.txt or tunableop.csv). Parts in FILE.parts resume an interrupted search."""
    gpus: tuple[str, ...] = ()
    """GPUs to use at the same time (default: all of this machine)."""
    bench: str = hipblaslt.PROGRAM
    """Program of hipBLASLt that tunes."""
    timeout: float = 1800.0
    """Time limit in seconds for one shape on a GPU, and for the run that compares steps."""
