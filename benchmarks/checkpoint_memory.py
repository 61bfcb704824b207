"""Peak memory of a conversion to Megatron's torch_dist and back, of a model that is larger than the memory allowed.

    python benchmarks/checkpoint_memory.py --preset qwen2.5_7B

The limit is one layer plus 1 GB (10^9 bytes). Every tensor that comes back is compared with the source by its checksum.
The tensors of the source lie at random places of one file of random bytes and overlap, so that the model takes 1.3 of
its size on the disk instead of 3 times: it reads them as those of any file. Shards of the way back are compared and
removed one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from checkpoint_convert import DTYPES, TiledWeights, convert
from train_speed import machine

from primus.checkpoint import conversion
from primus.checkpoint.checksum import choose_algorithm, create_hash
from primus.checkpoint.convert import TargetSettings, plan_conversion
from primus.checkpoint.formats import huggingface
from primus.checkpoint.formats.open import open_checkpoint
from primus.checkpoint.formats.safetensors_file import DTYPE_NAMES, SafetensorsFile
from primus.checkpoint.formats.tensor_bytes import write_tensor
from primus.checkpoint.output import OutputPlan, split_rows
from primus.checkpoint.weights import TensorInfo
from primus.config.extended_files import load_model

HERE = Path(__file__).parent
ALIGNMENT = 64
SLACK_BYTES = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen2.5_7B")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--folder", type=Path, help="where the models are written and removed again")
    parser.add_argument("--note", default="", help="kept in the record: what else ran on the machine")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        kind, source, target = options.step
        print(json.dumps(convert(source, target, "megatron") if kind == "there" else convert_shard(source, target)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        record = {"machine": machine(1), "preset": options.preset, "note": options.note}
        record |= measure(Path(scratch), options.preset, DTYPES[options.dtype])
    path = options.output or HERE / "results" / f"checkpoint_memory-cpu-{os.cpu_count()}-cores.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def measure(folder: Path, preset: str, dtype: torch.dtype) -> dict[str, Any]:
    """Both directions, each in processes of their own."""
    source, there = folder / "source", folder / "there"
    tensors = write_source(source, preset, dtype)
    total = sum(info.num_bytes for info in tensors.values())
    layer = sum(info.num_bytes for name, info in tensors.items() if ".layers.0." in name)
    peaks = {"huggingface to megatron": run_step("there", source, there)["peak_bytes"]}
    equal, back = 0, {"peak_bytes": 0, "shards": 1}
    original = SafetensorsFile(source / huggingface.SINGLE)
    shard = 0
    while shard < back["shards"]:
        written = run_step("back", there, folder / f"shard_{shard}")
        back = {"peak_bytes": max(back["peak_bytes"], written["peak_bytes"]), "shards": written["shards"]}
        (file,) = (folder / f"shard_{shard}").glob("*.safetensors")
        copy = SafetensorsFile(file)
        equal += sum(hash_tensor(copy, name) == hash_tensor(original, name) for name in copy.list_tensors())
        shutil.rmtree(folder / f"shard_{shard}")
        shard += 1
    peaks["megatron to huggingface"] = back["peak_bytes"]
    return {
        "bytes": total,
        "limit_bytes": layer + SLACK_BYTES,
        "peak_bytes": peaks,
        "tensors": len(tensors),
        "equal_tensors": equal,
        "passed": equal == len(tensors) and max(peaks.values()) <= layer + SLACK_BYTES,
    }


def run_step(kind: str, source: Path, target: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--step", kind, str(source), str(target)]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def convert_shard(source: str, target: str) -> dict[str, int]:
    """Write one shard of the model, whose number `target` ends with."""
    plan = plan_conversion(open_checkpoint(source), TargetSettings("huggingface")).plan
    file = plan.files[int(target.rpartition("_")[2])]
    conversion.write_checkpoint(Path(target), OutputPlan([file], lambda *_: None), file.name)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"peak_bytes": peak, "shards": len(plan.files)}


def write_source(folder: Path, preset: str, dtype: torch.dtype) -> dict[str, TensorInfo]:
    """A folder of Hugging Face whose tensors overlap; gives their sizes."""
    spec = load_model(preset)
    weights = TiledWeights(spec, dtype)
    tensors = weights.list_tensors()
    largest = max(tensors, key=lambda name: tensors[name].num_bytes)
    size = tensors[largest].num_bytes
    draw = random.Random(1)
    header = {}
    for name, info in tensors.items():
        start = draw.randrange(0, size - info.num_bytes + 1, ALIGNMENT)
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(info.shape),
            "data_offsets": [start, start + info.num_bytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    folder.mkdir()
    with (folder / huggingface.SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        generator = torch.Generator().manual_seed(1)
        for rows in split_rows(tensors[largest]):
            shape = weights.read(largest, rows).shape
            write_tensor(file, torch.randn(shape, generator=generator).to(dtype))
    (folder / huggingface.CONFIG).write_text(huggingface.format_config(spec, weights))
    return tensors


def hash_tensor(file: SafetensorsFile, name: str) -> str:
    digest = create_hash(choose_algorithm())
    for rows in split_rows(file.list_tensors()[name]):
        digest.update(file.read(name, rows).view(torch.uint8).numpy())
    return str(digest.hexdigest())


if __name__ == "__main__":
    main()
