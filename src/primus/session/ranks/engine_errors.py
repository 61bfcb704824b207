"""Errors of engines, in words that a user can act on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from primus.errors import PrimusError, UnfitError, format_error_place
from primus.package_files import PROGRAM


def find_reason(error: BaseException) -> str:
    """The first line of an error's text; where it has none, as a plain assertion, its kind and place."""
    text = str(error).strip()
    return text.splitlines()[0] if text else f"{type(error).__name__} at {format_error_place(error)}"


@contextmanager
def explain_import(package: str, engine: str) -> Iterator[None]:
    """Turn whatever a package raises while it is imported into an error that says how `engine` is installed.

    Raises:
        UnfitError: The package cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about each optional package that is not installed
            yield
    except Exception as error:
        raise UnfitError(
            f"{package} cannot be imported: {type(error).__name__}: {find_reason(error)}",
            f"{PROGRAM} setup --engine {engine} installs it; {PROGRAM} engines shows what is installed",
        ) from error


ExplainShortage = Callable[[BaseException], tuple[str, str]]
"""Where the memory was short, and what to do about it."""


def build_memory_error(error: BaseException, explain: ExplainShortage | None = None) -> PrimusError:
    """The error of a device or host without memory."""
    reason, where = find_reason(error), ""
    hint = (
        "lower micro_batch_size (gradients then accumulate to the same global_batch_size) or seq_length,"
        " set recompute_activations: true, or share the model among more processes"
    )
    if explain is not None:
        # There may be too little left for the explanation, too.
        with suppress(MemoryError, RuntimeError):
            where, hint = explain(error)
    return PrimusError(f"out of memory{' in ' * bool(where)}{where}: {reason}", hint)


@contextmanager
def explain_torch_errors(explain_shortage: ExplainShortage | None = None) -> Iterator[None]:
    """Turn PyTorch's errors about memory and compilation into errors that say what to do."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise build_memory_error(error, explain_shortage) from error
    except RuntimeError as error:
        if "allocate memory" in str(error):  # the message of the CPU allocator, c10/core/impl/alloc_cpu.cpp
            raise build_memory_error(error, explain_shortage) from error
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = find_reason(error)
            cache = "give TORCHINDUCTOR_CACHE_DIR a folder of your own, or one that your group may write (umask 002); "
            hint = f"{cache * ('PermissionError' in reason)}set compile: false to train without it"
            raise PrimusError(f"torch.compile failed: {reason}", hint) from error
        raise
