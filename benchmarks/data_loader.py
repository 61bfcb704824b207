"""What training data costs: start, memory and samples per CPU-second beside megatron-core's GPTDataset.

    python benchmarks/data_loader.py --documents 1e6 1e7 1e8 --python INTERPRETER_WITH_MEGATRON_CORE

Each side opens the same index in a process of its own, takes its first sample, and then many. The index is synthetic
(log-normal lengths, 400 tokens on average) and the tokens are a sparse file, so that 10^8 documents need 2 GB of disk.
The samples are read once before they are timed: what is compared is the work, not the disk. The rival starts twice: it
builds its indices, which it keeps beside the data, and finds them there. The sides take turns, and what counts are the
medians of the ratios within a round. `--ours-alone 1e9` (12 GB) measures our side only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from train_speed import machine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

SEQUENCE = 4096
MEAN_TOKENS = 400
TOKEN_BYTES = 2
CHUNK = 1 << 22
THEIR_SAMPLES = 200
"""Samples that the rival is timed on, again and again: at 10^8 documents each that is not in memory takes it 20 ms."""
TOKENS_PER_S = 1_000_000
SIDES = {"ours": "primus", "theirs": "megatron-core", "again": "megatron-core, its indices built"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=float, nargs="*", default=[1e6, 1e7, 1e8])
    parser.add_argument("--ours-alone", type=float, nargs="*", default=[], help="numbers of documents for us only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has megatron-core and torch")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    parser.add_argument("--side", choices=[*SIDES, "ahead"], help=argparse.SUPPRESS)
    parser.add_argument("--prefix", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure = {"ours": ours, "theirs": theirs, "again": theirs, "ahead": read_ahead}[options.side]
        print(json.dumps(measure(options.prefix)))
        return
    record: dict[str, Any] = {"machine": machine(1), "rounds": options.rounds, "sequence": SEQUENCE, "documents": {}}
    for count in options.documents:
        record["documents"][f"{count:.0e}"] = compared(int(count), options.rounds, options.python)
    for count in options.ours_alone:
        record["documents"][f"{count:.0e}"] = alone(int(count), options.rounds)
    text = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"data_loader-{options.machine}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(text + "\n")
    print(f"{text}\nwritten: {output}")


def compared(count: int, rounds: int, python: str) -> dict[str, Any]:
    """Both sides on an index of `count` documents."""
    with tempfile.TemporaryDirectory(prefix="data_loader-") as folder:
        prefix = write_index(Path(folder) / "x", count)
        interpreters = {"ours": sys.executable, "theirs": python, "again": python}
        measured: list[dict[str, dict[str, float]]] = []
        for number in range(rounds):
            shutil.rmtree(prefix / "cache", ignore_errors=True)
            order = ("ours", "theirs", "again") if number % 2 == 0 else ("theirs", "again", "ours")
            measured.append({side: child(interpreters[side], side, prefix) for side in order})
        ahead = child(sys.executable, "ahead", prefix)
    keys = list(measured[0]["ours"])
    result: dict[str, Any] = {
        name: {key: round(statistics.median(one[side][key] for one in measured), 4) for key in keys}
        for side, name in SIDES.items()
    }
    for side in ("theirs", "again"):
        result[f"times {SIDES[side]}"] = {
            key: round(statistics.median(_times_better(one["ours"], one[side], key) for one in measured), 2)
            for key in keys
        }
    return result | {"reading_ahead": ahead}


def _times_better(ours: dict[str, float], theirs: dict[str, float], key: str) -> float:
    more_is_better = key == "samples_per_cpu_s"
    return ours[key] / theirs[key] if more_is_better else theirs[key] / ours[key]


def alone(count: int, rounds: int) -> dict[str, Any]:
    """Our side on an index of `count` documents."""
    with tempfile.TemporaryDirectory(prefix="data_loader-") as folder:
        prefix = write_index(Path(folder) / "x", count)
        measured = [child(sys.executable, "ours", prefix) for _ in range(rounds)]
        ahead = child(sys.executable, "ahead", prefix)
    found = {key: round(statistics.median(one[key] for one in measured), 4) for key in measured[0]}
    return {SIDES["ours"]: found, "reading_ahead": ahead}


def child(python: str, side: str, prefix: Path) -> dict[str, float]:
    """What a side measures in a process of its own."""
    command = [python, __file__, "--side", side, "--prefix", str(prefix)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_index(prefix: Path, count: int) -> Path:
    """An .idx of `count` documents, and a .bin of that size that takes no room."""
    from primus.data.megatron.indexed_dataset import HEADER, MAGIC

    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, count, count + 1))
        for start in range(0, count, CHUNK):
            file.write(_lengths(start, count).astype("<i4").tobytes())
        end = 0
        for start in range(0, count, CHUNK):
            sizes = _lengths(start, count) * TOKEN_BYTES
            file.write((end + np.cumsum(sizes) - sizes).astype("<i8").tobytes())
            end += int(sizes.sum())
        file.seek(8 * count, os.SEEK_CUR)  # of the document borders, nobody here reads more than the last
        file.write(struct.pack("<q", count))
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(end)
    return prefix


def _lengths(start: int, count: int) -> np.ndarray:
    random = np.random.default_rng([start, count])
    lengths = random.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, min(CHUNK, count - start))
    return np.clip(lengths, 1, 100_000).astype(np.int64)


def ours(prefix: Path) -> dict[str, float]:
    """Our `PackedDataset`; timed over a whole window of samples, so that every block is laid out anew."""
    from primus.data.megatron.indexed_dataset import IndexedTokens
    from primus.data.training.packing import WINDOW, PackedDataset

    def opened() -> Any:
        return PackedDataset(IndexedTokens(prefix), SEQUENCE, seed=1, vocab_size=50_000)

    dataset, found = started(opened)
    samples = range(min(WINDOW, dataset.samples_per_epoch))
    read(dataset, samples)
    again = PackedDataset(dataset.tokens, SEQUENCE, seed=1, vocab_size=50_000)
    again[0]
    return found | {"samples_per_cpu_s": max(read(again, samples), read(again, samples))}


def theirs(prefix: Path) -> dict[str, float]:
    """megatron-core's `GPTDataset` of one epoch, without the attention mask."""
    warnings.simplefilter("ignore")
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 50_000, 0, 1, {}

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        split="1,0,0",
        blend=([str(prefix)], None),
    )

    def opened() -> Any:
        indexed = IndexedDataset(str(prefix), mmap=True)
        documents = np.arange(len(indexed.sequence_lengths), dtype=np.int32)
        return GPTDataset(indexed, str(prefix), documents, None, Split.train, config)

    dataset, found = started(opened)
    samples = range(THEIR_SAMPLES)
    read(dataset, samples)
    return found | {"samples_per_cpu_s": max(read(dataset, samples), read(dataset, samples))}


def started(opened: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """A dataset whose first sample has been taken, with the CPU time, wall time and memory of that."""
    before = memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    cpu, wall = time.process_time(), time.perf_counter()
    dataset = opened()
    dataset[0]
    return dataset, {
        "start_cpu_s": time.process_time() - cpu,
        "start_wall_s": time.perf_counter() - wall,
        "peak_mib": memory_mib("VmHWM") - before,
    }


def read(dataset: Any, samples: range) -> float:
    """Samples per CPU-second."""
    before = time.process_time()
    for sample in samples:
        dataset[sample]
    return len(samples) / (time.process_time() - before)


def read_ahead(prefix: Path) -> dict[str, float]:
    """Steps of a quarter of a second that take a million tokens a second from one reading thread."""
    from primus.data.megatron.indexed_dataset import IndexedTokens
    from primus.data.training.loader import Batches, BatchShape
    from primus.data.training.packing import PackedDataset

    dataset = PackedDataset(IndexedTokens(prefix), SEQUENCE, seed=1, vocab_size=50_000)
    size, steps = TOKENS_PER_S // 4 // SEQUENCE, 20
    waited = []
    with Batches(dataset, BatchShape(size, 1)) as batches:
        next(batches)
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(steps):
            time.sleep(size * SEQUENCE / TOKENS_PER_S)  # the step that trains on the batch
            before = time.perf_counter()
            next(batches)
            waited.append(time.perf_counter() - before)
        share = (time.process_time() - cpu) / (time.perf_counter() - began)
    return {"cpu_share": round(share, 4), "most_waited_ms": round(1e3 * max(waited), 3)}


def memory_mib(field: str) -> float:
    """A line of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
