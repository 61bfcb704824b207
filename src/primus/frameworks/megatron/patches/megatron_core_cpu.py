"""megatron-core runs on a machine without GPUs: where it asks for a CUDA device, it gets the CPU.

megatron-core has no CPU mode. It passes `device="cuda"`, calls `torch.cuda.current_device()` and moves tensors with
`.cuda()`. Without a GPU each of these raises, so the replacements change no call that would work. The arithmetic stays
that of megatron-core.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from types import SimpleNamespace
from typing import Any

from primus.machine.devices import count_devices
from primus.patch import Patch

PATCH = Patch(
    target="megatron-core",
    module="megatron.core",
    versions=">=0.16,<0.20",
    reason="megatron-core names CUDA devices in its code, so nothing trains on a CPU",
    link="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/pipeline_parallel/schedules.py#L596",
    expires=date(2027, 6, 30),
    backend=("megatron", "megatron_bridge"),
)

CONSTRUCTORS = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros", "empty_like", "zeros_like")
"""Functions of torch that megatron-core calls with `device="cuda"`."""
TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
}
"""Names of tensor types on the CPU, and those that the optimizers of megatron-core compare with."""


class HostStream:
    """The stream of a CPU: every call returns when its work is done, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> HostStream:
        return self

    def synchronize(self) -> None: ...


def is_needed() -> bool:
    """Whether the machine has no GPU."""
    return count_devices(os.environ) == 0


def apply() -> None:
    """Replace the CUDA calls of megatron-core by those of the CPU; torch.compile of its small functions is off."""
    import torch

    if getattr(torch.cuda.current_device, "is_cpu", False):
        return
    _replace_device_calls(torch)
    for name in CONSTRUCTORS:
        setattr(torch, name, _redirect_device(getattr(torch, name)))
    _replace_random_states(torch)
    _accept_cpu_parameters(torch)
    _skip_exchanges_of_one_process()


def _replace_device_calls(torch: Any) -> None:
    cpu = torch.device("cpu")

    def current_device() -> Any:
        return cpu

    current_device.is_cpu = True  # type: ignore[attr-defined]
    torch.cuda.current_device = current_device
    # A function for each: torch._dynamo refuses one function under several names.
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, _build_empty_call())
    # Megatron-LM asks for the architecture, to require a variable of older GPUs (megatron/training/arguments.py).
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(name="cpu", major=10, minor=0)
    torch.cuda.Stream, torch.cuda.current_stream = HostStream, lambda device=None: HostStream()
    torch.cuda.stream = lambda stream: nullcontext()
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    # Before any other module of megatron-core is imported: they decorate their functions with it on import. Compiling
    # them on a CPU takes longer than a short run.
    from megatron.core import jit

    jit.disable_jit_fuser()


def _build_empty_call() -> Callable[..., None]:
    """A function that does nothing: a CPU has no queue of kernels and no cache of memory."""
    return lambda *args, **kwargs: None


def _redirect_device(construct: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(construct)
    def construct_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        return construct(*args, **kwargs)

    return construct_on_cpu


def _is_cuda(device: Any) -> bool:
    return str(device).partition(":")[0] == "cuda"


def _replace_random_states(torch: Any) -> None:
    """Let the tracker of random states use the generator of the CPU."""
    from megatron.core.tensor_parallel import random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state


def _accept_cpu_parameters(torch: Any) -> None:
    """Let the mixed-precision optimizers sort parameters on the CPU by their type, as they sort those on a GPU."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    wrapped = optimizer.Float16OptimizerWithFloat16Params
    wrapped.__init__ = _add_cuda_type_names(torch, wrapped.__init__)
    sharded = distrib_optimizer.DistributedOptimizer
    sharded.__init__ = _add_cuda_type_names(torch, sharded.__init__)
    clip = _add_cuda_type_names(torch, clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = optimizer.clip_grad_by_total_norm_fp32 = clip


def _skip_exchanges_of_one_process() -> None:
    """Let one process keep its gradients and parameters where they are.

    Gloo copies the whole buffer there and back, which takes 5 % of a step; NCCL copies nothing within one buffer.
    """
    from megatron.core.distributed import param_and_grad_buffer

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(param_and_grad_buffer, name, _skip_if_alone(getattr(param_and_grad_buffer, name)))


def _skip_if_alone(exchange: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(exchange)
    def call(output: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        if group is not None and group.size() == 1 and output.data_ptr() == source.data_ptr():
            return None
        return exchange(output, source, *args, **kwargs)

    return call


def _add_cuda_type_names(torch: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _name_types_as_cuda(torch):
            return function(*args, **kwargs)

    return call


@contextmanager
def _name_types_as_cuda(torch: Any) -> Iterator[None]:
    """`tensor.type()` without arguments answers as on a GPU, for the duration of a `with`."""
    plain = torch.Tensor.type

    def name_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        return TYPE_NAMES.get(found, found) if isinstance(found, str) else found

    torch.Tensor.type = name_type
    try:
        yield
    finally:
        torch.Tensor.type = plain
