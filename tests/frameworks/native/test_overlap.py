"""A trace of a step of two processes: gradients are reduced and weights gathered layer by layer, between the passes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fakes.gloo import in_processes
from primus.config.schema import ModelSpec, OptimizerConfig, ParallelConfig
from primus.frameworks.native.engine.layout import build_layout
from primus.frameworks.native.engine.model import build_model, initialize_weights
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step

LAYERS = 4
SPEC = ModelSpec(num_layers=LAYERS, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=67)
NAMES = {
    "c10d::_reduce_scatter_base_": "reduce",
    "c10d::_allgather_base_": "gather",
    "_SwiGLU": "forward",
    "_SwiGLUBackward": "backward",
}
"""What happens once for each layer, and the exchanges of FSDP2."""


def _trace(rank: int, folder: Path) -> None:
    model = build_model(SPEC, "meta", 0, layout=build_layout(ParallelConfig(), torch.device("cpu"), 2))
    trainable = prepare_model(model, device="cpu")
    initialize_weights(model, 0)
    optimizer = build_optimizer(model, OptimizerConfig())
    tokens = torch.zeros((1, 9), dtype=torch.int64)
    batch = (tokens[:, :-1], tokens[:, 1:])
    for index in range(2):  # the order of the first step is that of the hooks' first call
        with profile(activities=[ProfilerActivity.CPU]) as found:
            train_step(trainable, optimizer, [batch, batch], learning_rate=1e-3, clip_grad=1.0)
        if index == 1 and rank == 0:
            ordered = sorted(found.events(), key=lambda event: event.time_range.start)
            torch.save([NAMES[event.name] for event in ordered if event.name in NAMES], folder / "order")
    dist.barrier()


def test_gradients_are_reduced_and_weights_gathered_between_the_passes_of_layers(tmp_path: Path) -> None:
    in_processes(2, _trace, tmp_path)
    order = torch.load(tmp_path / "order")
    first, second = order[: find_end(order, LAYERS)], order[find_end(order, LAYERS) :]
    assert first.count("reduce") == 0, "gradients add up over micro batches before they are reduced"
    passes = second[second.index("backward") :]
    # Layer by layer; the last reductions are those of the first layer, and of embedding and head.
    assert second.count("reduce") == LAYERS + 1
    assert passes[: find_end(passes, LAYERS)].count("reduce") == LAYERS - 1
    # In the backward pass the weights of the next layer are gathered before this layer has finished.
    gathered = second[len(second) - second[::-1].index("forward") : second.index("backward")]
    assert gathered.count("gather") >= 2


def find_end(order: list[str], number: int) -> int:
    """The place after the backward pass with this number."""
    places = [place for place, name in enumerate(order) if name == "backward"]
    return places[number - 1] + 1
