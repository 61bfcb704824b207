"""What a conversion costs: its throughput beside `cp` of the same bytes, and its peak memory.

    python benchmarks/checkpoint_convert.py --preset llama3.2_1B --dtype bf16 --formats megatron torchtitan native

A model of random weights is written in the format of Hugging Face, and converted to each format and from there back.
For each direction `cp` of the source followed by `sync` of the copy, and a conversion, take turns. What counts are the
medians of the ratios within a round, of the bytes that each side writes in a second of wall time and of processor time:
a format may hold a tied tensor twice. The memory is the peak resident size of the converting process, and what it has
more than after the imports. Three times the model's size must be free on the disk.

Where the time goes, by profiles: see benchmarks/README.md.
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
from primus.checkpoint.formats import dcp_folder  # noqa: E402, F401 - imports do not count
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, open_checkpoint  # noqa: E402
from primus.checkpoint.weights import TensorInfo, get_bounds  # noqa: E402
from primus.config.extended_files import load_model  # noqa: E402
from primus.config.schema import ModelSpec  # noqa: E402
from primus.frameworks.megatron import torch_ranks  # noqa: E402, F401

TILE = 1 << 24
FORMATS = {
    "huggingface": TargetSettings("huggingface"),
    "native": TargetSettings("native"),
    "torchtitan": TargetSettings("torchtitan"),
    "megatron": TargetSettings("megatron"),
    "megatron_torch": TargetSettings("megatron", format="torch"),
}
"""Targets by their name on the command line; the last is Megatron's older format."""


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
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
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
    record |= {"rounds": options.rounds, "note": options.note, "directions": {}}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        record["bytes"] = write_source(folder / "source", options.preset, options.dtype)
        for name in options.formats:
            there, back = folder / name, folder / "back"
            directions = {f"huggingface to {name}": (folder / "source", there, name)}
            if name != "huggingface":
                directions[f"{name} to huggingface"] = (there, back, "huggingface")
            for direction, (source, target, to) in directions.items():
                found = compare(source, target, to, options.rounds, record["bytes"])
                record["directions"][direction] = found
                print(direction, json.dumps(found), flush=True)
            for used in (there, back):
                shutil.rmtree(used, ignore_errors=True)
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


def compare(source: Path, target: Path, to: str, rounds: int, num_bytes: int) -> dict[str, Any]:
    """The two sides in turns; leaves the last target."""
    copied, converted = [], []
    for _ in range(rounds):
        copied.append(copy(source, target))
        command = [sys.executable, __file__, "--convert", str(source), str(target), to]
        converted.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    pairs = list(zip(copied, converted, strict=True))
    written = count_bytes(target) / count_bytes(source)
    return {
        "throughput_ratio": statistics.median(written * cp["seconds"] / own["seconds"] for cp, own in pairs),
        "cpu_ratio": statistics.median(written * cp["cpu_seconds"] / own["cpu_seconds"] for cp, own in pairs),
        "written_by_read": written,
        "cp_gb_per_s": num_bytes / 1e9 / statistics.median(cp["seconds"] for cp in copied),
        "convert_gb_per_s": num_bytes / 1e9 / statistics.median(own["seconds"] for own in converted),
        "peak_bytes": max(own["peak_bytes"] for own in converted),
        "grown_bytes": max(own["grown_bytes"] for own in converted),
        "rounds": [{"cp": cp, "convert": own} for cp, own in pairs],
    }


def copy(source: Path, target: Path) -> dict[str, float]:
    """A copy that is durable, as a conversion is."""
    shutil.rmtree(target, ignore_errors=True)
    before, start = count_cpu_seconds(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *(path for path in target.rglob("*") if path.is_file())], check=True)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu_seconds": count_cpu_seconds(resource.RUSAGE_CHILDREN) - before}


def convert(source: str, target: str, to: str) -> dict[str, float]:
    """One conversion in a process of its own; the imports do not count."""
    # Removed as late as for `cp`: a virtual machine may give free memory back after seconds, and pay to get it again.
    shutil.rmtree(target)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    used = count_cpu_seconds(resource.RUSAGE_SELF)
    planned = plan_conversion(open_checkpoint(source), FORMATS[to])
    write_conversion(planned, Path(target), lambda _: None)
    seconds, used = time.perf_counter() - start, count_cpu_seconds(resource.RUSAGE_SELF) - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = {"peak_bytes": peak << 10, "grown_bytes": (peak - before) << 10}
    return {"seconds": seconds, "cpu_seconds": used, **memory}


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def count_cpu_seconds(who: int) -> float:
    """Processor time of this process, or of its children that have ended."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
