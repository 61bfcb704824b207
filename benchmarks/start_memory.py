"""Memory and time of a start: the model is set up, sharded and filled with initial weights in several processes.

    python benchmarks/start_memory.py --preset llama3.1_8B --layers 2 --processes 4

The limit for each process is its share of the weights plus 1 GB (10^9 bytes). The rival is one process that draws all
values of the same model: with N processes that share the work, the time goes towards one N-th.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import structs
from torch.multiprocessing import start_processes
from train_speed import machine

from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec, ParallelConfig
from primus.frameworks.native.engine.layout import build_layout
from primus.frameworks.native.engine.model import build_model, initialize_weights
from primus.frameworks.native.engine.step import prepare_model

HERE = Path(__file__).parent
SLACK_BYTES = 10**9
SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3.1_8B")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--note", default="", help="kept in the record: what else ran on the machine")
    options = parser.parse_args()
    spec = structs.replace(load_model(f"{options.preset}.yaml"), num_layers=options.layers)
    rows = measure(options.processes, options.tensor, spec)
    worst = max(row["growth_bytes"] - row["own_bytes"] for row in rows)
    record = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine(1),
        "preset": options.preset,
        "layers": options.layers,
        "tensor_model_parallel_size": options.tensor,
        "note": options.note,
        "processes": rows,
        "most_beyond_the_share_bytes": worst,
        "is_met": worst <= SLACK_BYTES,
    }
    file = HERE / "results" / f"start_memory-{options.processes}-processes.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print({key: round(value / 1e9, 3) if key.endswith("bytes") else value for key, value in row.items()})
    print(f"most beyond the share: {worst / 1e9:.2f} GB (limit 1)")


def measure(count: int, tensor: int, spec: ModelSpec) -> list[dict[str, float]]:
    """Of each process: bytes of its weights, growth of its peak resident set, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_set_up, (count, tensor, spec, folder), nprocs=count, start_method="spawn")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(count)]


def _set_up(rank: int, count: int, tensor: int, spec: ModelSpec, folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    layout = build_layout(ParallelConfig(tensor_model_parallel_size=tensor), device, count)
    # The first model brings in what the set-up imports.
    tiny = structs.replace(spec, num_layers=1, hidden_size=256, ffn_hidden_size=256, vocab_size=256)
    _build(structs.replace(tiny, num_attention_heads=4, num_query_groups=4, kv_channels=64), layout, device)
    before, began, processor_began = _read_peak_bytes(), time.monotonic(), time.process_time()
    model = _build(spec, layout, device)
    seconds, processor_s = time.monotonic() - began, time.process_time() - processor_began
    own = sum(weight.local.nbytes for weight in model.place_weights().values())
    row = {"own_bytes": own, "growth_bytes": _read_peak_bytes() - before, "seconds": round(seconds, 1)}
    Path(folder, str(rank)).write_text(json.dumps({**row, "processor_s": round(processor_s, 1)}), encoding="utf-8")
    if count > 1:
        dist.destroy_process_group()


def _build(spec: ModelSpec, layout: object, device: torch.device):  # type: ignore[no-untyped-def]
    built = build_model(spec, "meta", SEED, torch.float32, layout)  # type: ignore[arg-type]
    model = prepare_model(built, device=device).model
    initialize_weights(model, SEED)
    return model


def _read_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
