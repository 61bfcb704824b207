"""What a conversion costs: its throughput beside `cp` of the same bytes, and its peak memory.

    python benchmarks/checkpoint_convert.py --preset llama3.2_1B --dtype bf16 --to megatron torchtitan native

A model of random weights is written in the format of Hugging Face. Then `cp` of its folder followed by `sync` of the
copy, and a conversion of it, take turns: both read the same files and write as many bytes to the disk. What counts are
the medians of the ratios within a round. The memory is the peak resident size of the converting process, and what it
has more than after the imports. Three times the model's size must be free on the disk.

Where the time goes, by profiles: nine tenths are the kernel's copy into the page cache. The source is mapped into
memory part by part, so that there is one copy, as in `cp`. On two busy cores a thread that read ahead, and telling the
disk to begin every 128 MB (sync_file_range), cost 1.0 s of CPU time for 1 GB to Hugging Face instead of 0.4 s, and
three times the wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from train_speed import machine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

from primus.checkpoint.convert import DTYPES, TargetSettings, plan_conversion, write_conversion  # noqa: E402
from primus.checkpoint.family import list_hub_shapes  # noqa: E402
from primus.checkpoint.formats import engine_folders, megatron  # noqa: E402, F401 - imports do not count
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, open_checkpoint  # noqa: E402
from primus.checkpoint.weights import TensorInfo, get_bounds  # noqa: E402
from primus.config.load import load_model  # noqa: E402
from primus.config.schema import ModelSpec  # noqa: E402

TILE = 1 << 24


class TiledWeights:
    """Random weights that repeat after `TILE` elements: drawing billions would take longer than the measurement."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._tile = torch.randn(TILE, generator=torch.Generator().manual_seed(1)).to(dtype)
        self._tensors = {name: TensorInfo(shape, dtype) for name, shape in list_hub_shapes(spec).items()}

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        shape = self._tensors[name].shape
        start, stop = get_bounds(rows, shape[0])
        count = (stop - start) * (torch.Size(shape).numel() // shape[0])
        repeats = -(-count // TILE)
        return self._tile.repeat(repeats)[:count].reshape(stop - start, *shape[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3.2_1B")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--to", nargs="+", default=["megatron", "torchtitan", "native", "huggingface"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the models are written and removed again")
    parser.add_argument("--note", default="", help="kept in the record: what else ran on the machine")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert:
        print(json.dumps(convert(*options.convert)))
        return
    record: dict[str, Any] = {"machine": machine(1), "preset": options.preset, "dtype": options.dtype}
    record |= {"rounds": options.rounds, "note": options.note, "targets": {}}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        record["bytes"] = write_source(folder / "source", options.preset, options.dtype)
        for to in options.to:
            record["targets"][to] = compare(folder, to, options.rounds, record["bytes"])
            print(to, json.dumps(record["targets"][to]), flush=True)
    path = options.output or HERE / "results" / f"checkpoint_convert-{options.machine}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(path)


def write_source(folder: Path, preset: str, dtype: str) -> int:
    """Write the model; returns its size."""
    spec = load_model(preset)
    opened = OpenedCheckpoint(TiledWeights(spec, DTYPES[dtype]), spec, None, FoundCheckpoint("native", folder, None))
    planned = plan_conversion(opened, TargetSettings("huggingface"))
    write_conversion(planned, folder, lambda _: None)
    return planned.plan.num_bytes


def compare(folder: Path, to: str, rounds: int, num_bytes: int) -> dict[str, Any]:
    """The two sides in turns."""
    copied, converted, peaks, grown = [], [], [], []
    for _ in range(rounds):
        copied.append(copy(folder / "source", folder / "copy"))
        shutil.rmtree(folder / "copy")
        command = [sys.executable, __file__, "--convert", str(folder / "source"), str(folder / "target"), to]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        shutil.rmtree(folder / "target")
        converted.append(found["seconds"])
        peaks.append(found["peak_bytes"])
        grown.append(found["grown_bytes"])
    return {
        "cp_seconds": copied,
        "convert_seconds": converted,
        "cp_gb_per_s": num_bytes / 1e9 / statistics.median(copied),
        "convert_gb_per_s": num_bytes / 1e9 / statistics.median(converted),
        "throughput_ratio": statistics.median(a / b for a, b in zip(copied, converted, strict=True)),
        "peak_bytes": max(peaks),
        "grown_bytes": max(grown),
    }


def copy(source: Path, target: Path) -> float:
    """Seconds of a copy that is durable, as a conversion is."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)
    return time.perf_counter() - start


def convert(source: str, target: str, to: Any) -> dict[str, float]:
    """One conversion in a process of its own; the imports do not count."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    planned = plan_conversion(open_checkpoint(source), TargetSettings(to))
    write_conversion(planned, Path(target), lambda _: None)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "peak_bytes": peak << 10, "grown_bytes": (peak - before) << 10}


if __name__ == "__main__":
    main()
