"""A trial of the kernels of a run, before its first step: at its shapes, forward and backward, against float64.

A kernel that leaves part of its output unwritten shows what the memory held before. The trial fills the memory that the
allocator gives next with NaN, so that it shows at once instead of as a loss that rises after days
(AMD-AGI/Primus-Turbo#397, ROCm/composable_kernel#2863).

Shape suffixes: those of `ops` and `experts`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from primus.callback import Callback
from primus.errors import PrimusError
from primus.frameworks.native.engine import ops, rope
from primus.frameworks.native.engine.experts import activate, run_experts
from primus.frameworks.native.engine.loss import cross_entropy
from primus.frameworks.native.engine.model import Transformer
from primus.models.counts import expert_ffn_size, head_dim, num_query_groups
from primus.session.session import Session

BUDGET_S = 5.0
"""After this time no further kernel is tried."""
MAX_DOUBLES = 2**27
"""Elements of the largest float64 copy, 1 GiB: larger shapes are cut."""
MAX_ROWS = 2**14
"""Rows of experts."""
BLOCK = 1024
"""Queries whose float64 scores are in memory at once."""
LIMITS = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference from float64, as a share of the largest element: eight roundings of the dtype."""
LIMIT = 2e-3
"""The same in float32, whose products may be rounded to TF32."""


class TriedKernel(NamedTuple):
    """A function of tensors as a run calls it, and what it should compute."""

    name: str
    run: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    """The plain formula."""
    inputs: tuple[Tensor, ...]
    """Those of floating point get a gradient."""


class KernelVerdict(NamedTuple):
    """What a trial has found."""

    name: str
    shapes: list[list[int]]
    """Of the inputs."""
    error: float
    """Largest difference from float64 in an output or a gradient, as a share of its largest element; NaN if part of
    them is not written."""
    limit: float
    is_repeatable: bool
    """Whether a second run gives equal bits."""

    @property
    def problem(self) -> str:
        """Empty if the kernel is right."""
        if math.isnan(self.error):
            return "leaves part of its output unwritten, or not finite"
        return f"differs from float64 by {self.error:.1e} (limit {self.limit:.0e})" if self.error > self.limit else ""


class KernelTrial(Callback):
    """Tries the kernels of a run before its first step, on each process's device.

    Args:
        session: The run.
        model: That is trained.
        device: Of this process.
    """

    def __init__(self, session: Session, model: Transformer, device: torch.device) -> None:
        self._session, self._model, self._device = session, model, device

    def before_train(self) -> None:
        """Try them.

        Raises:
            PrimusError: One is wrong.
        """
        session, training = self._session, self._session.trainer.training
        started = time.monotonic()
        kernels = list_kernels(self._model, self._device, training.micro_batch_size, training.seq_length)
        verdicts = try_kernels(kernels)
        seconds = time.monotonic() - started
        if session.processes.is_first:
            tried = [{**each._asdict(), "problem": each.problem} for each in verdicts]
            session.attempt.event("kernel_trial", time_s=seconds, kernels=tried)
        wrong = [each for each in verdicts if each.problem]
        if wrong:
            problem = "; ".join(f"{each.name} {each.shapes} {each.problem}" for each in wrong)
            raise PrimusError(
                f"kernel trial on {_name_device(self._device)} with torch {torch.__version__}: {problem}",
                "use another version of PyTorch or of the driver; kernel_trial: off trains all the same",
            )
        session.reporter.print_line(f"kernel trial: {len(verdicts)} right in {seconds:.1f} s")


def try_kernels(kernels: Iterator[TriedKernel], budget_s: float = BUDGET_S) -> list[KernelVerdict]:
    """The verdicts of kernels, one after the other until the time is over."""
    end = time.monotonic() + budget_s
    verdicts = []
    for kernel in kernels:
        verdicts.append(judge(kernel))
        if time.monotonic() > end:
            break
    return verdicts


def judge(kernel: TriedKernel) -> KernelVerdict:
    """Run a kernel twice in memory that holds NaN, and once its formula in float64."""
    doubles = [each.double() if each.is_floating_point() else each for each in kernel.inputs]
    expected = _compute(kernel.reference, doubles)
    found = []
    for _ in range(2):
        _spread_nan(expected, kernel.inputs)
        found.append(_compute(kernel.run, kernel.inputs))
    errors = [_measure_error(*pair) for each in found for pair in zip(each, expected, strict=True)]
    return KernelVerdict(
        kernel.name,
        [list(each.shape) for each in kernel.inputs],
        math.nan if any(map(math.isnan, errors)) else max(errors),
        LIMITS.get(kernel.inputs[0].dtype, LIMIT),
        all(torch.equal(*pair) for pair in zip(*found, strict=True)),
    )


def _compute(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of its product with fixed numbers."""
    leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
    y = function(*leaves)
    generator = torch.Generator().manual_seed(y.dim())
    grad = torch.randn(y.shape, generator=generator).to(y)
    return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], grad)]


def _spread_nan(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Leave NaN in free memory of the sizes of the outputs, which the allocator then gives to the kernel."""
    dtypes = {each.dtype for each in inputs if each.is_floating_point()}
    held = [torch.full(each.shape, math.nan, dtype=dtype, device=each.device) for each in outputs for dtype in dtypes]
    del held


def _measure_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected).abs().max()
    return (difference / expected.abs().max().clamp_min(torch.finfo(found.dtype).tiny)).item()


def list_kernels(model: Transformer, device: torch.device, batch: int, length: int) -> Iterator[TriedKernel]:
    """The kernels of a model's layers and loss, at the shapes of this process, made one after the other."""
    spec, layout = model.spec, model.layout
    dtype = model.compute_dtype or next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    length //= layout.context.size
    width, channels, tokens = spec.hidden_size, head_dim(spec), min(batch * length, BLOCK)
    if spec.num_experts is not None:
        yield from _list_experts(model, draw, device, batch * length)
    heads = min(2, spec.num_attention_heads // num_query_groups(spec))
    q, k, v = draw(1, heads, length, channels), draw(1, 1, length, channels), draw(1, 1, length, channels)
    yield TriedKernel("attention", ops.causal_attention, _attend, (q, k, v))
    scale = draw(width)
    yield TriedKernel(
        "RMSNorm",
        lambda x, w: ops.rms_norm(x, w, spec.norm_epsilon),
        _normalize(spec.norm_epsilon),
        (draw(tokens, width), scale),
    )
    if not spec.num_experts:
        yield TriedKernel("SwiGLU", ops.swiglu, _gate, (draw(tokens, 2 * spec.ffn_hidden_size // layout.tensor.size),))
    angles = rope.compute_tables(model.frequencies, length, dtype, rope.compute_table_scale(spec))
    rotary = rope.count_rotary_channels(spec)
    yield TriedKernel(
        "rotary embedding", lambda x: ops.apply_rotary(x, *angles), _rotate(*angles), (draw(1, length, heads, rotary),)
    )
    vocabulary = min(spec.vocab_size // layout.tensor.size, MAX_DOUBLES // width)
    rows = min(tokens, MAX_DOUBLES // vocabulary)
    targets = torch.randint(vocabulary, (rows,), generator=generator).to(device)
    head = draw(vocabulary, width, scale=width**-0.5)
    yield TriedKernel("cross-entropy", cross_entropy, _lose, (draw(rows, width), head, targets))


def _list_experts(
    model: Transformer, draw: Callable[..., Tensor], device: torch.device, tokens: int
) -> Iterator[TriedKernel]:
    """Experts with even numbers of rows, with all rows at one, and with Zipf's numbers, of which some are 0."""
    spec = model.spec
    assert spec.num_experts is not None
    width, hidden = expert_ffn_size(spec), spec.hidden_size
    number = max(1, min(spec.num_experts // model.layout.expert.size, MAX_DOUBLES // (2 * width * hidden)))
    rows = min(tokens * spec.moe_router_topk, MAX_ROWS, MAX_DOUBLES // (2 * width))
    x_RD, scores_R = draw(rows, hidden), draw(rows)
    gate_up, down = draw(number, 2 * width, hidden, scale=hidden**-0.5), draw(number, hidden, width, scale=width**-0.5)

    def run(x_RD: Tensor, scores_R: Tensor, counts_E: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
        return run_experts(x_RD, scores_R, counts_E, gate_up_EGD, down_EDF, clamp=spec.activation_clamp)

    def compute(x_RD: Tensor, scores_R: Tensor, counts_E: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
        parts = zip(x_RD.split(counts_E.tolist()), gate_up_EGD, down_EDF, strict=True)
        y = [F.linear(activate(F.linear(x, first), spec.activation_clamp), second) for x, first, second in parts]
        return torch.cat(y) * scores_R.unsqueeze(1)

    one, harmonic = [0] * number, sum(1 / (1 + n) for n in range(number))
    one[number // 2] = rows
    zipf = [int(rows / harmonic / (1 + n)) if n % 3 != 1 else 0 for n in range(number)]
    for name, counts in (("even", [rows // number] * number), ("all at one", one), ("Zipf", zipf)):
        counts[0] += rows - sum(counts)
        counts_E = torch.tensor(counts, device=device)
        yield TriedKernel(f"experts ({name})", run, compute, (x_RD, scores_R, counts_E, gate_up, down))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def attend_block(q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        rows = torch.arange(begin, begin + q.shape[2], device=q.device).unsqueeze(1)
        return scores.masked_fill(torch.arange(k.shape[2], device=q.device) > rows, -math.inf).softmax(-1) @ v

    begins = range(0, q.shape[2], BLOCK)
    blocks: list[Any] = [
        checkpoint(attend_block, part, k, v, begin, use_reentrant=False)
        for begin, part in zip(begins, q.split(BLOCK, 2), strict=True)
    ]
    return torch.cat(blocks, 2)


def _normalize(epsilon: float) -> Callable[..., Tensor]:
    return lambda x, weight: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def _rotate(cosine: Tensor, sine: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * cosine.double() + torch.cat(x.chunk(2, -1)[::-1], -1) * sine.double()


def _lose(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, targets, reduction="sum")


def _name_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
