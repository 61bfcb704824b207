"""Adapters next to the matrices of native's layers, and their tensors by the names of peft.

LoRA (arXiv 2106.09685) adds a product of two matrices to a weight. DoRA (arXiv 2402.09353) also learns the length of
each row of the sum.

Shape suffixes: D input width, R rank, F output width.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from primus.checkpoint.family import list_hub_shapes, list_rules
from primus.checkpoint.formats.adapter import AdapterFiles, build_config, name_parts
from primus.errors import UsageError
from primus.frameworks.native.engine.layers import Linear
from primus.frameworks.native.engine.model import ADAPTER, Transformer
from primus.frameworks.native.engine.placement import PlacedWeight
from primus.session.settings.adapter_settings import AdapterSettings

MATRICES = {
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "mlp.linear_fc1": "feed_forward.gate_up",
    "mlp.linear_fc2": "feed_forward.down",
}
"""Matrix of a layer by its name in Megatron, which `peft_target_modules` has."""


class Adapter(nn.Module):
    """Adds scale x up(down(dropout(x))) to a projection, in the dtype of its input."""

    def __init__(self, linear: Linear, settings: AdapterSettings) -> None:
        super().__init__()
        rank, place = settings.peft_dim, linear.weight.device
        self.down_RD = nn.Parameter(torch.empty(rank, linear.in_features, device=place))
        self.up_FR = nn.Parameter(torch.empty(linear.out_features, rank, device=place))
        self.scale = settings.scale
        self.dropout = settings.peft_dropout
        self.length_F: nn.Parameter | None = None
        if settings.peft == "dora":
            self.length_F = nn.Parameter(torch.empty(linear.out_features, device=place))

    def forward(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        """The projection `y` of `x` by `linear`, adapted."""
        delta = self._multiply(x)
        if self.length_F is None:
            return y + delta
        weight_FD = linear.weight.detach().float()
        sum_FD = torch.addmm(weight_FD, self.up_FR.float(), self.down_RD.float(), alpha=self.scale)
        # The length is a constant in the gradient, as in section 4.3 of the paper and in peft.
        ratio_F = (self.length_F / measure_rows(sum_FD).detach()).to(x.dtype)
        bias = 0 if linear.bias is None else linear.bias.to(y.dtype)
        return y + (ratio_F - 1) * (y - bias) + ratio_F * delta

    def _multiply(self, x: Tensor) -> Tensor:
        # Evaluation and generation take no gradients, and drop nothing.
        if self.dropout and torch.is_grad_enabled():
            x = F.dropout(x, self.dropout)
        return F.linear(F.linear(x, self.down_RD.to(x.dtype)), self.up_FR.to(x.dtype)) * self.scale


def measure_rows(weight_FD: Tensor) -> Tensor:
    """The length of each row."""
    return torch.linalg.vector_norm(weight_FD, dim=1)


def add_adapters(model: Transformer, settings: AdapterSettings) -> None:
    """Freeze the weights of `model`, and add adapters to the matrices that `settings` chooses.

    Raises:
        UsageError: It chooses none.
    """
    model.requires_grad_(False)
    model.adapters = settings
    added = 0
    for number, layer in model.layers.items():
        for path, own in MATRICES.items():
            name, short = f"decoder.layers.{number}.{path}", path.rpartition(".")[2]
            if any(fnmatch(name, each) or fnmatch(short, each) for each in settings.peft_target_modules):
                linear = layer.get_submodule(own)
                assert isinstance(linear, Linear)
                linear.adapter = Adapter(linear, settings)
                added += 1
    if not added:
        raise UsageError(
            f"peft_target_modules: {', '.join(settings.peft_target_modules)} matches no matrix of the model",
            "matrices are named like decoder.layers.0.self_attention.linear_qkv",
        )


def initialize_adapters(model: Transformer, seed: int) -> None:
    """Fill the adapters in place, sharded or not, so that training begins with the model as it is: `up` is zero.

    The weights under them are loaded; every process must call this.
    """
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if ADAPTER not in name:
            continue
        value = torch.zeros(weight.shape)
        if name.endswith("length_F"):
            value = measure_rows(_copy_whole(weights[f"{name.rpartition(ADAPTER)[0]}.weight"]).float())
        if name.endswith("down_RD"):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            bound = 1 / math.sqrt(weight.shape[1])
            value.uniform_(-bound, bound, generator=generator)
        PlacedWeight(weight).fill(value)


def collect_adapter_files(model: Transformer, load: str) -> AdapterFiles:
    """A copy of the adapters as peft has them; if the model is sharded, every process must call this.

    Args:
        model: With adapters.
        load: The checkpoint of the model under them.
    """
    assert model.adapters is not None
    settings = model.adapters
    tensors = dict(_iterate_tensors(model))
    sizes = settings.peft_dim, settings.peft_alpha, settings.peft_dropout
    forms = {"use_dora": settings.peft == "dora", "use_rslora": settings.peft_rslora}
    return AdapterFiles(load, build_config(tensors, *sizes, model.spec.num_layers) | forms, tensors)


def _iterate_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The hub has query, key and value (gate and up) apart: each takes its rows of `up`, and all of `down`."""
    rules = {rule.engine.name: rule for rule in list_rules(model.spec, "native")}
    shapes = list_hub_shapes(model.spec)
    for name, module in model.named_modules():
        if not isinstance(module, Adapter):
            continue
        parts = [part.name for part in rules[f"{name.removesuffix('.adapter')}.weight"].hub]
        down_RD, up_FR = _copy_whole(module.down_RD), _copy_whole(module.up_FR)
        sizes = [shapes[part][0] for part in parts]
        for part, rows_FR in zip(parts, up_FR.split(sizes), strict=True):
            down_name, up_name, _ = name_parts(part)
            yield down_name, down_RD
            yield up_name, rows_FR
        if module.length_F is not None:
            for part, rows_F in zip(parts, _copy_whole(module.length_F).split(sizes), strict=True):
                yield name_parts(part)[2], rows_F


def _copy_whole(weight: Tensor) -> Tensor:
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole.detach().to("cpu", copy=True)
