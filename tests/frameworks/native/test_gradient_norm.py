"""The gradient norm is exact on CPU, whatever the size of a tensor and wherever it is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.gloo import in_processes
from primus.frameworks.native.engine.gradient_norm import SHORT_VECTOR_ELEMENTS
from primus.frameworks.native.engine.gradient_norm import compute_gradient_norm as compute_norm_of_placed
from primus.frameworks.native.engine.placement import PlacedWeight

TOLERANCE = 1e-9
LARGEST = 67_000_000
"""Elements of the largest tensor, about that of an embedding of 32,000 tokens and 2,048 dimensions."""


def compute_gradient_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return compute_norm_of_placed([PlacedWeight(each) for each in gradients])


def exact_norm(*gradients: torch.Tensor) -> float:
    """The norm in Python's own extended precision, in which a sum is rounded once."""
    parts = (part.double().square() for each in gradients for part in each.flatten().split(2**16))
    return math.sqrt(math.fsum(part.sum().item() for part in parts))


@pytest.mark.parametrize("count", [1, 4096, SHORT_VECTOR_ELEMENTS, 2**22 + 7, LARGEST])
def test_the_norm_of_a_float32_tensor_is_exact_at_any_size(count: int) -> None:
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(count))
    assert compute_gradient_norm([gradient]).item() == pytest.approx(exact_norm(gradient), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("shape", "rows", "tolerance"), [((3_000_001,), slice(None), TOLERANCE), ((4000, 1500), slice(7, 10), 1e-14)]
)
def test_the_norm_does_not_depend_on_where_a_gradient_is_cut(
    shape: tuple[int, ...], rows: slice, tolerance: float
) -> None:
    """By whole rows, as processes share it, exactly, also where few rows are not zero."""
    gradient = torch.zeros(shape)
    gradient[rows] = torch.randn(gradient[rows].shape, generator=torch.Generator().manual_seed(1))
    whole = compute_gradient_norm([gradient]).item()
    for count in (2, 3, 8):
        assert compute_gradient_norm(gradient.chunk(count)).item() == pytest.approx(whole, rel=tolerance)


def test_the_norm_of_nothing_is_zero_and_an_infinite_gradient_has_no_finite_norm() -> None:
    assert compute_gradient_norm([]).item() == 0.0
    assert not compute_gradient_norm([torch.ones(9), torch.tensor([float("inf")])]).isfinite()
    assert compute_gradient_norm([torch.full((4,), 3e19)]).item() == pytest.approx(6e19, rel=1e-6), "no overflow"


def test_processes_that_share_or_copy_a_gradient_find_the_norm_of_one(tmp_path: Path) -> None:
    in_processes(2, _write_norms, tmp_path)
    whole, cut, copied = _gradients()
    norms = [torch.load(tmp_path / f"norm_{rank}") for rank in range(2)]
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(exact_norm(whole, cut, copied), rel=TOLERANCE)


def _gradients() -> list[torch.Tensor]:
    """Gradients of sizes that two processes share evenly and unevenly."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for shape in ((4000, 300), (301, 7), (50, 50))]


def _write_norms(rank: int, folder: Path) -> None:
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    nested = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    whole, cut, copied = _gradients()
    gradients: list[DTensor] = [
        distribute_tensor(whole, flat, [Shard(0)]),
        distribute_tensor(cut, flat, [Shard(0)]),
        distribute_tensor(copied, nested, [Replicate(), Shard(0)]),
    ]
    torch.save(compute_gradient_norm(gradients).item(), folder / f"norm_{rank}")


@pytest.mark.parametrize("count", [36_869, 5_000_011])
def test_the_norm_has_the_same_bits_with_any_number_of_threads(count: int) -> None:
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(5))
    before, norms = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            norms.add(compute_gradient_norm([gradient]).item())
    finally:
        torch.set_num_threads(before)
    assert len(norms) == 1


class CallCounter(TorchDispatchMode):
    """Counts the kernels that are called, and the largest float64 tensor that one of them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.largest = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.num_calls += 1
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.largest = max(self.largest, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_the_norm_of_many_elements_takes_few_kernels_and_no_copy_in_float64() -> None:
    gradient = torch.randn((2**16, 2**8), generator=torch.Generator().manual_seed(6))
    with CallCounter() as counter:
        compute_gradient_norm([gradient])
    assert counter.num_calls < 50
    assert counter.largest == 2**16
