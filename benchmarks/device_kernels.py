"""Time and memory of native's attention, loss and experts beside the plain forms, and their trial against float64.

    python benchmarks/device_kernels.py --device cuda

Forward and backward; the sides take turns, and what counts is the median of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from primus.config.schema import ModelSpec
from primus.frameworks.native.engine import ops
from primus.frameworks.native.engine.experts import run_experts
from primus.frameworks.native.engine.kernel_trial import KernelVerdict, list_kernels, try_kernels
from primus.frameworks.native.engine.loss import cross_entropy
from primus.frameworks.native.engine.model import build_model

TURNS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cuda: also AMD's GPUs")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(sys.argv[1:])
    on_gpu, device = options.device == "cuda", torch.device(options.device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shapes = build_shapes(on_gpu)
    with torch.device(device):
        rows = [compare(name, *pair, device) for name, pair in build_pairs(shapes, dtype).items()]
    verdicts = [verdict._asdict() | {"problem": verdict.problem} for verdict in list_verdicts(shapes, dtype, device)]
    record = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "shapes": shapes,
        "rows": rows,
        "trial": verdicts,
    }
    for row in rows:
        print(f"{row['name']:<24} {row['ms']:9.2f} ms  {row['faster_by']:5.2f}x  memory {row['memory_share']}")
    for verdict in verdicts:
        print(
            f"{verdict['name']:<24} {verdict['error']:.1e} of {verdict['limit']:.0e}  {verdict['problem'] or 'right'}"
        )
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    raise SystemExit(any(verdict["problem"] for verdict in verdicts))


def build_shapes(on_gpu: bool) -> dict[str, int]:
    """Those of Llama 3.1 8B and of Mixtral 8x7B on a GPU."""
    if not on_gpu:
        return {"length": 64, "width": 64, "ffn": 96, "heads": 4, "groups": 2, "vocab": 500, "experts": 4}
    return {"length": 8192, "width": 4096, "ffn": 14336, "heads": 32, "groups": 8, "vocab": 128256, "experts": 8}


def list_verdicts(shapes: dict[str, int], dtype: torch.dtype, device: torch.device) -> list[KernelVerdict]:
    models = [build_one_layer(shapes, experts, dtype, device) for experts in (None, shapes["experts"])]
    return [each for model in models for each in try_kernels(list_kernels(model, device, 1, shapes["length"]), 60)]


def build_one_layer(shapes: dict[str, int], experts: int | None, dtype: torch.dtype, device: torch.device):
    spec = ModelSpec(
        num_layers=1,
        hidden_size=shapes["width"],
        ffn_hidden_size=shapes["ffn"],
        num_attention_heads=shapes["heads"],
        num_query_groups=shapes["groups"],
        vocab_size=shapes["vocab"],
        max_position_embeddings=shapes["length"],
        num_experts=experts,
    )
    model = build_model(spec, device, 1)
    model.compute_dtype = dtype
    return model


Function = Callable[[], torch.Tensor]


def build_pairs(shapes: dict[str, int], dtype: torch.dtype) -> dict[str, tuple[Function, Function]]:
    """Ours and the plain form of each kernel, on the same inputs."""
    length, width, channels = shapes["length"], shapes["width"], shapes["width"] // shapes["heads"]

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * width**-0.5).to(dtype).requires_grad_()

    q, k, v = draw(1, shapes["heads"], length, channels), *(draw(1, shapes["groups"], length, channels) for _ in "kv")
    repeats = shapes["heads"] // shapes["groups"]
    hidden, head = draw(length, width), draw(shapes["vocab"], width)
    targets = torch.randint(shapes["vocab"], (length,))
    experts, rows = shapes["experts"], 2 * length
    first, second = draw(experts, 2 * shapes["ffn"], width), draw(experts, width, shapes["ffn"])
    x, scores = draw(rows, width), torch.ones(rows)
    counts = torch.full((experts,), rows // experts)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), is_causal=True
        )

    def loop() -> torch.Tensor:
        parts = zip(x.split(counts.tolist()), first, second, strict=True)
        return torch.cat([ops.swiglu(part @ one.T) @ two.T for part, one, two in parts])

    return {
        "attention": (lambda: ops.causal_attention(q, k, v), attend),
        "linear cross-entropy": (
            lambda: cross_entropy(hidden, head, targets),
            lambda: F.cross_entropy((hidden @ head.T).float(), targets, reduction="sum"),
        ),
        "experts": (lambda: run_experts(x, scores, counts, first, second), loop),
    }


def compare(name: str, ours: Function, plain: Function, device: torch.device) -> dict:
    turns = [(measure(ours, device), measure(plain, device)) for _ in range(TURNS + 2)][2:]
    memory = [statistics.median(turn[side][1] for turn in turns) for side in (0, 1)]
    return {
        "name": name,
        "ms": statistics.median(turn[0][0] for turn in turns) * 1e3,
        "faster_by": statistics.median(turn[1][0] / turn[0][0] for turn in turns),
        "memory_share": round(memory[0] / memory[1], 2) if memory[1] else None,
    }


def measure(function: Function, device: torch.device) -> tuple[float, int]:
    """Seconds of a forward and a backward pass, and the bytes of their peak; 0 on a CPU."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, started = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
    y = function()
    y.sum().backward()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() - before if on_gpu else 0


if __name__ == "__main__":
    main()
