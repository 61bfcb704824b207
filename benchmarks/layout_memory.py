"""Memory of ranks as `analyze layout` says it, beside that of the same code with gloo on this machine.

    python benchmarks/layout_memory.py

For each layout, one process for each rank trains a step of a model with a peak above 1 GiB. Two numbers are compared
with the peak of the fake run: the peak that the observer sees over the real tensors, and the growth of the process
(VmHWM of /proc/self/status, reset before set-up). The latter has the memory of threads and libraries besides, and with
a router of real tokens some ranks get more than an even share of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from train_speed import machine

from primus.config.schema import Experiment, ModelSpec, ParallelConfig, Trainer, TrainingConfig

if TYPE_CHECKING:
    from primus.session.fake_run.observer import StepObserver

HERE = Path(__file__).parent
LIMIT_S = 280.0
DENSE: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}
MOE = DENSE | {"num_layers": 6, "hidden_size": 768, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 1536}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dense, sharded over 2": (2, DENSE, {}, {}, {}),
    "experts 2, even capacity": (
        2,
        MOE,
        {"expert_model_parallel_size": 2},
        {"micro_batch_size": 4},
        {"moe_expert_capacity_factor": 1.0},
    ),
    "dense, tensor 2 with sequence": (
        2,
        DENSE,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"micro_batch_size": 4},
        {},
    ),
    "dense, pipeline 2": (
        2,
        DENSE,
        {"pipeline_model_parallel_size": 2},
        {"global_batch_size": 8},
        {},
    ),
    "experts, sharded over 2": (2, MOE, {}, {}, {}),
    "dense, sharded over 2, recomputed": (
        2,
        DENSE,
        {},
        {"recompute_activations": True, "micro_batch_size": 8},
        {},
    ),
    "experts, pipeline 2": (
        2,
        MOE,
        {"pipeline_model_parallel_size": 2},
        {"global_batch_size": 8},
        {},
    ),
    "dense, context 2": (2, DENSE, {"context_parallel_size": 2}, {"micro_batch_size": 4}, {}),
    "experts 2 x tensor 2 with sequence": (
        2,
        MOE,
        {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"micro_batch_size": 4},
        {"moe_expert_capacity_factor": 1.0},
    ),
    "dense, one process": (1, DENSE, {}, {}, {}),
    "dense, 2 replicas": (2, DENSE, {"use_distributed_optimizer": False}, {}, {}),
    "dense, sharded over 2, selectively recomputed": (
        2,
        DENSE,
        {},
        {"micro_batch_size": 4},
        {"recompute_granularity": "selective"},
    ),
    "experts 2": (2, MOE, {"expert_model_parallel_size": 2}, {"micro_batch_size": 4}, {}),
    "dense, sharded over 2, gradients of 3 micro batches": (2, DENSE, {}, {"global_batch_size": 12}, {}),
    "dense, pipeline 2 with 2 groups": (
        2,
        DENSE,
        {"pipeline_model_parallel_size": 2},
        {"global_batch_size": 8},
        {"num_virtual_stages_per_pipeline_rank": 2},
    ),
    "dense, tensor 2": (2, DENSE, {"tensor_model_parallel_size": 2}, {"micro_batch_size": 4}, {}),
    "dense, sharded 2 x tensor 2": (
        4,
        DENSE | {"num_layers": 10},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"micro_batch_size": 8},
        {},
    ),
    "dense, sharded over 2, 8-bit states": (
        2,
        DENSE | {"num_layers": 12},
        {},
        {"micro_batch_size": 4},
        {"optimizer": "adamw_8bit"},
    ),
}
"""Number of processes, then settings of the model, the layout, the training, and the rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="layouts whose name contains this")
    parser.add_argument("--note", default="", help="kept in the record: what else ran on the machine")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "layout_memory-cpu-2-cores.json")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        name, rank, store = options.rank
        print(json.dumps(measure_rank(name, int(rank), store)))
        return
    rows = []
    for name in (each for each in LAYOUTS if options.only is None or options.only in each):
        rows += compare_layout(name)
        record = {"machine": machine(1), "note": options.note, "rows": rows}
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    worst = max(rows, key=lambda row: abs(row["observed_error"]))
    print(f"{len(rows)} ranks; worst error against the observed peak {worst['observed_error']:+.2%}: {worst['layout']}")
    worst = max(rows, key=lambda row: abs(row["resident_error"]))
    print(f"worst error against the growth of the process {worst['resident_error']:+.2%}: {worst['layout']}")


def compare_layout(name: str) -> list[dict[str, Any]]:
    """A row for each rank."""
    world = LAYOUTS[name][0]
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--rank", name]
        running = [
            subprocess.Popen([*command, str(rank), f"{folder}/store"], stdout=subprocess.PIPE, env=environ)
            for rank in range(world)
        ]
        rows = [json.loads(each.communicate(timeout=LIMIT_S)[0]) for each in running]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def build_experiment(name: str) -> Experiment:
    _, model, parallel, training, others = LAYOUTS[name]
    trainer = Trainer(
        model=msgspec.convert(model, ModelSpec),
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(
            **{"device": "cpu", "bf16": False, "seq_length": 256, "micro_batch_size": 2, "compile": False} | training
        ),
        backend_args={key: value for key, value in others.items() if key != "optimizer"},
    )
    if "optimizer" in others:
        trainer = msgspec.structs.replace(
            trainer, optimizer=msgspec.structs.replace(trainer.optimizer, optimizer=others["optimizer"])
        )
    return Experiment(exp_name="layout", trainer=trainer)


def measure_rank(name: str, rank: int, store: str) -> dict[str, Any]:
    """A step of one rank on fake tensors, then with gloo."""
    import torch
    import torch.distributed as dist

    from primus.frameworks.native.engine.fake_rank import run_fake_rank

    world, asked = LAYOUTS[name][0], build_experiment(name)
    record = run_fake_rank(asked, rank, world, world)
    torch.manual_seed(rank)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    # What kernels, threads and gloo take on first use is no memory of the model.
    small = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 8, "vocab_size": 512}
    train(
        msgspec.structs.replace(asked.trainer, model=msgspec.structs.replace(asked.trainer.model, **small)), rank, world
    )
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = read_status("VmRSS")
    observer = train(asked.trainer, rank, world)
    resident = read_status("VmHWM") - before
    observed = observer.find_moments()[0].parts.total
    flops = sum(each.flops for each in observer.list_work())
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    peak = record.peak.parts.total
    return {
        "layout": name,
        "rank": rank,
        "fake_gib": round(peak / 2**30, 4),
        "observed_gib": round(observed / 2**30, 4),
        "resident_gib": round(resident / 2**30, 4),
        "observed_error": round(peak / observed - 1, 5),
        "resident_error": round(peak / resident - 1, 5),
        "same_flops": record.flops == flops,
        "moment": [record.peak.phase, record.peak.micro_batch],
    }


def train(trainer: Trainer, rank: int, world: int) -> StepObserver:
    """A step with gloo, observed."""
    import torch

    from primus.frameworks.native.engine.fake_rank import execute_step, name_groups
    from primus.frameworks.native.engine.layout import build_layout
    from primus.frameworks.native.engine.model import initialize_weights
    from primus.frameworks.native.layout_settings import LayoutSettings
    from primus.frameworks.native.support import read_own_settings
    from primus.session.fake_run.fake_record import StepPlan
    from primus.session.fake_run.observer import StepObserver

    settings = read_own_settings(trainer, LayoutSettings)
    layout = build_layout(trainer.parallel, torch.device("cpu"), world, settings)
    observer = StepObserver(name_groups(layout), world, is_fake=False)
    count = StepPlan(trainer, world, 1).micro_batches
    execute_step(trainer, layout, rank, world, count, observer, None, lambda model: initialize_weights(model, 1))
    return observer


def read_status(key: str) -> int:
    """Bytes of a line of /proc/self/status (proc_pid_status(5))."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
