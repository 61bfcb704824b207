"""Tokenizing beside Megatron-LM's two scripts: whole commands on the same text, tokenizer and number of workers.

    python benchmarks/data_encode.py --megatron FOLDER --python PYTHON --megabytes 200 --rounds 3

FOLDER is a checkout of Megatron-LM, of which tools/preprocess_data.py and, where it is there, preprocess_data_fast.py
are run by an interpreter that has their packages (transformers, gigatoken, ...); without it only our side is measured.
The text is that of the system's documentation and of Python's library, cut into documents as long as web pages. The
sides take turns within a round; files of all sides must be equal byte for byte, or there is no record.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from launch_time import HERE, REPOSITORY
from train_speed import machine
from vocabularies import vocabulary

from primus.data.shards.shard_queue import compute_checksum
from primus.data.tokenizers.load import load_tokenizer

ROOTS = (Path("/usr/share/doc"), Path(sysconfig.get_path("stdlib")))
SUFFIXES = (".txt", ".rst", ".md", ".html", ".py", ".gz")
MEDIAN_CHARACTERS, SIGMA = 2000, 1.0
"""Of the log-normal lengths of documents; about those of C4 and FineWeb."""
WHOLE = 0.05
"""Share of files that stay as they are."""

SLOW, FAST = "preprocess_data.py", "preprocess_data_fast.py"
SAMPLE_EVERY_S = 0.05
TARGETS = {f"{SLOW}, 1 worker": 30, f"{SLOW}, 2 workers": 25, f"{FAST}, 2 workers": 5, "--no-fast, 1 worker": 1.2}
"""Ratios of wall time, start-up included; `--no-fast` is compared with preprocess_data.py."""
MEMORY_MIB = 256
"""What a worker may need, and the command beside its workers."""


@dataclass(frozen=True)
class Side:
    """One command that makes token files."""

    name: str
    workers: int
    command: tuple[str, ...]
    prefix: Path

    @property
    def label(self) -> str:
        return f"{self.name}, {plural(self.workers)}"


def plural(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--python", default=sys.executable, help="interpreter for its scripts")
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabularies", nargs="+", default=["gpt2", "llama3"])
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--folder", help="where the text and the files are made, for a while")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="primus-encode-", dir=options.folder))
    try:
        text = folder / "text.jsonl"
        record: dict[str, object] = {"machine": machine(os.cpu_count() or 1), "rounds": options.rounds}
        record["text"] = write_corpus(text, int(options.megabytes * 1e6))
        for name in options.vocabularies:
            record[name] = measured(options, name, text, folder)
    finally:
        shutil.rmtree(folder)
    content = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"data_encode-{options.machine}.json"
    output.write_text(content + "\n")
    print(f"{content}\nwritten: {output}")


def measured(options: argparse.Namespace, name: str, text: Path, folder: Path) -> dict[str, object]:
    """All sides with one vocabulary."""
    sides = list(sides_of(options, name, text, folder))
    taken: dict[str, list[tuple[float, float]]] = {side.label: [] for side in sides}
    for number in range(options.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            taken[side.label].append(run(side))
            print(name, side.label, *(f"{value:.2f} s" for value in taken[side.label][-1]), file=sys.stderr)
        check_equal(sides)
    compared = {
        side.label: ratios(taken[side.label], taken[f"primus, {plural(min(side.workers, 2))}"])
        for side in sides
        if side.name in (SLOW, FAST)
    }
    if f"{SLOW}, 1 worker" in taken:
        compared["--no-fast, 1 worker"] = ratios(taken[f"{SLOW}, 1 worker"], taken["--no-fast, 1 worker"])
    return {
        "wall_s": {label: summary([wall for wall, _ in values]) for label, values in taken.items()},
        "cpu_s": {label: summary([cpu for _, cpu in values]) for label, values in taken.items()},
        "megabytes_per_cpu_s": {
            label: round(text.stat().st_size / 1e6 / statistics.median(cpu for _, cpu in values), 1)
            for label, values in taken.items()
        },
        "ratios": compared,
        "memory_mib": {side.label: memory(side) for side in sides if side.name in ("primus", FAST)},
        "targets": {"memory_mib": MEMORY_MIB} | TARGETS,
    }


def sides_of(options: argparse.Namespace, name: str, text: Path, folder: Path) -> Iterator[Side]:
    tokenizer = prepared_vocabulary(name, folder / name)
    ours = (str(REPOSITORY / "primus-cli"), "direct", "--", "data", "encode", "--input", str(text), "--append-eod")
    for workers in (1, 2):
        prefix = folder / f"primus-{name}-{workers}"
        words = ("--tokenizer", str(tokenizer), "--output", str(prefix), "--workers", str(workers))
        yield Side("primus", workers, (*ours, *words), prefix)
    prefix = folder / f"no-fast-{name}"
    words = ("--no-fast", "--tokenizer", str(tokenizer), "--output", str(prefix), "--workers", "1")
    yield Side("--no-fast", 1, (*ours, *words), prefix)
    for script in (SLOW, FAST):
        path = options.megatron / "tools" / script if options.megatron else None
        if not path or not path.is_file():
            continue
        for workers in (1, 2) if script == SLOW else (os.cpu_count() or 1,):
            prefix = folder / f"{path.stem}-{name}-{workers}"
            words = ("--input", str(text), "--output-prefix", str(prefix), "--append-eod")
            kind = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer.parent))
            own = ("--workers", str(workers)) if script == SLOW else ("--use-gigatoken",)  # which takes all cores
            yield Side(script, workers, (options.python, str(path), *words, *kind, *own), prefix)


def prepared_vocabulary(name: str, folder: Path) -> Path:
    """A tokenizer.json that all sides understand alike: without a template, which one of Megatron's scripts obeys."""
    described = json.loads(vocabulary(name).read_bytes()) | {"post_processor": None}
    folder.mkdir()
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(described))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": load_tokenizer(str(path)).eod}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def run(side: Side) -> tuple[float, float]:
    """Wall and CPU seconds of a side's whole command, which begins without anything made before."""
    remove(side)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(side.command, capture_output=True, text=True, env=os.environ | {"PRIMUS_RUNS": ""})
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(side.command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ratios(theirs: list[tuple[float, float]], ours: list[tuple[float, float]]) -> dict[str, object]:
    """How many times as long another side took in each round; more is better for us."""
    pairs = list(zip(theirs, ours, strict=True))
    return {
        "wall": summary([other[0] / own[0] for other, own in pairs]),
        "cpu": summary([other[1] / own[1] for other, own in pairs]),
    }


def memory(side: Side) -> dict[str, int]:
    """Peak proportional set size, in MiB, of the command and all its workers, and of the largest of them."""
    remove(side)
    process = psutil.Popen(side.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    largest = total = 0
    over = threading.Event()
    while not over.wait(SAMPLE_EVERY_S):
        sizes = [size for each in family(process) if (size := proportional(each))]
        largest, total = max(largest, *sizes, 0), max(total, sum(sizes))
        if process.poll() is not None:
            over.set()
    return {"largest": largest >> 20, "total": total >> 20}


def family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def proportional(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def check_equal(sides: list[Side]) -> None:
    """Make sure that all sides have made the same files."""
    for end in ("bin", "idx"):
        digests = {side.label: compute_checksum(Path(f"{side.prefix}_text_document.{end}")) for side in sides}
        if len(set(digests.values())) > 1:
            raise SystemExit(f"the .{end} differ: {json.dumps(digests, indent=1)}")


def remove(side: Side) -> None:
    for file in side.prefix.parent.glob(f"{side.prefix.name}_*"):
        file.unlink()


def write_corpus(path: Path, num_bytes: int) -> dict[str, int]:
    """Documents of real text as JSON lines, the same on the same system."""
    rng = random.Random(7)
    files = sorted(file for root in ROOTS for file in root.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    rng.shuffle(files)
    documents: list[str] = []
    size = 0
    while size < num_bytes:  # again where the system has less text; other cuts make other documents
        before = size
        for file in files:
            for document in cut(rng, read(file)):
                documents.append(document)
                size += len(document.encode())
            if size >= num_bytes:
                break
        if size == before:
            raise SystemExit(f"no text below {', '.join(map(str, ROOTS))}")
    rng.shuffle(documents)
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": document}) + "\n" for document in documents)
    return {"documents": len(documents), "bytes": size, "file_bytes": path.stat().st_size}


def cut(rng: random.Random, text: str) -> Iterator[str]:
    """A text in pieces of log-normal length that end where a line ends, or now and then as a whole."""
    start = 0
    whole = rng.random() < WHOLE
    while start < len(text):
        length = len(text) if whole else int(MEDIAN_CHARACTERS * rng.lognormvariate(0, SIGMA))
        end = text.find("\n", start + length) + 1 or len(text)
        if text[start:end].strip():
            yield text[start:end]
        start = end


def read(file: Path) -> str:
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return ""


def summary(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


if __name__ == "__main__":
    main()
