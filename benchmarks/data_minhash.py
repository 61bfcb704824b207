"""Near-duplicate removal against datatrove: speed of the signatures, recall, precision and what each keeps.

    python benchmarks/data_minhash.py --rival PYTHON_WITH_DATATROVE

Both read the same JSON lines: real text cut into documents, with copies of some of them among the later ones, changed
in case and spacing, by edits of words, or by added text. Processor time is that of one process, from opening the input
to signatures on disk, without imports; the sides take turns. A pair counts as found where not both of it are kept.
Similarity is exact: of the sets of 5-word shingles, in our words. The rival's interpreter needs
``datatrove==0.10.1 spacy tokenizers orjson nltk regex "xxhash<4"``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
PLACES = [Path(sysconfig.get_path("stdlib")), Path("/usr/share/doc"), Path("/usr/share/perl")]
KINDS = frozenset({".py", ".txt", ".md", ".rst", ".html", ".pod", ".gz"})
MEDIAN_CHARACTERS = 2000
BINS = ((0.9, 1.01), (0.8, 0.9), (0.7, 0.8), (0.5, 0.7))
NGRAM = 5

RIVAL = """
import json, resource, sys
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.logging import logger
logger.remove()
folder, work = sys.argv[1:]
config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
def run(pipeline, tasks=1):
    before = cpu()
    LocalPipelineExecutor(pipeline=pipeline, tasks=tasks, workers=1, skip_completed=False).run()
    return cpu() - before
reader = lambda: JsonlReader(folder, glob_pattern="*.jsonl")
warm = MinhashDedupSignature(f"{work}/sig", config)
warm.get_shingles("some words that load the tokenizer before the clock starts")
times = {"signatures": run([reader(), MinhashDedupSignature(f"{work}/sig", config)])}
times["pairs"] = run([MinhashDedupBuckets(f"{work}/sig", f"{work}/buckets", config=config)], 14)
times["clusters"] = run([MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config)])
times["documents"] = run([
    reader(), MinhashDedupFilter(f"{work}/remove"), JsonlWriter(f"{work}/kept", compression=None)])
peak = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"cpu_s": times, "rss": peak}))
"""

OURS = """
import json, resource, sys
from pathlib import Path
from primus.data.shards import inputs
from primus.data.readers import shard
from primus.data.filter.dedup import keys
from primus.data.filter.dedup.job import DedupJob
from primus.data.filter.result_folder import filter_documents
from primus.data.filter.dedup.recipe import DedupRecipe
from primus.data.shards.shard_queue import open_shard_queue, process_shards
folder, place, *seed = sys.argv[1:]
recipe = DedupRecipe(seed=int(seed[0]) if seed else 1)
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
stage = keys.KeyStage(["benchmark"], recipe, "text", "file")
stage.start()
source = inputs.open_files((folder,))
before = cpu()
board = open_shard_queue(stage, source.shards, Path(place) / "keys")
assert process_shards(board, lambda counts: None, lambda row: False)
times = {"signatures": cpu() - before}
before = cpu()
filter_documents(DedupJob(inputs=(folder,), output=Path(place) / "kept", recipe=recipe, workers=1))
times["all"] = cpu() - before
peak = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"cpu_s": times, "rss": peak}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", help="interpreter that has datatrove; without it only ours is measured")
    parser.add_argument("--megabytes", type=float, default=12, help="text before copies are added")
    parser.add_argument("--copies", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        record = measure(Path(place), options)
    text = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"data_minhash-{options.machine}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(text + "\n")
    print(f"{text}\nwritten: {output}")


def measure(place: Path, options: argparse.Namespace) -> dict[str, object]:
    """Everything in one run."""
    documents, pairs = corpus(options.megabytes, options.copies)
    (place / "input").mkdir()
    with (place / "input" / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text, "id": str(number)}) + "\n" for number, text in enumerate(documents))
    size = sum(len(text.encode()) for text in documents)
    found = shingles(documents)
    sides: dict[str, list[dict[str, float]]] = defaultdict(list)
    kept = {}
    for turn in range(options.rounds):
        for side, python, program in (("ours", sys.executable, OURS), ("datatrove", options.rival, RIVAL)):
            if python:
                work = place / f"{side}-{turn}"
                sides[side].append(one_run(python, program, place / "input", work))
                kept[side] = kept_numbers(work / "kept")
    similarities = {pair: jaccard(found[pair[0]], found[pair[1]]) for pair in pairs}
    record: dict[str, object] = {
        "documents": len(documents),
        "megabytes": round(size / 1e6, 2),
        "copies": len(pairs),
        "whole_command": whole_command(place),
    }
    for side, runs in sides.items():
        removed = set(range(len(documents))) - kept[side]
        record[side] = {
            "mb_per_cpu_s": round(size / 1e6 / statistics.median(run["signatures"] for run in runs), 3),
            "cpu_s": runs,
            "kept": len(kept[side]),
            "recall": recall(similarities, kept[side]),
            "precision": precision(removed, found),
        }
    if "datatrove" in sides:
        record["ratio"] = round(
            statistics.median(
                theirs["signatures"] / ours["signatures"]
                for ours, theirs in zip(sides["ours"], sides["datatrove"], strict=True)
            ),
            1,
        )
        one_run(sys.executable, OURS, place / "input", place / "seed", "2")
        seeded = kept_numbers(place / "seed" / "kept")
        record["same_decision"] = {
            "datatrove": agreement(similarities, kept["ours"], kept["datatrove"], len(documents)),
            "ours with another seed": agreement(similarities, kept["ours"], seeded, len(documents)),
        }
    return record


def one_run(python: str, program: str, folder: Path, work: Path, *words: str) -> dict[str, float]:
    """CPU seconds of each stage, and memory, of a program in a process of its own."""
    work.mkdir()
    done = subprocess.run(
        [python, "-c", program, str(folder), str(work), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    if done.returncode:
        sys.exit(f"{python}: {done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return {**{name: round(value, 3) for name, value in result["cpu_s"].items()}, "rss_mb": result["rss"] // 10**6}


def whole_command(place: Path) -> dict[str, float]:
    """Wall and CPU seconds of `data dedup` with start-up, and the memory of its largest process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [str(HERE.parent / "primus-cli"), "direct", "--", "data", "dedup", "--input", str(place / "input")]
    subprocess.run([*command, "--output", str(place / "whole"), "--json"], check=True, capture_output=True, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": round(time.perf_counter() - start, 2),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
    }


def kept_numbers(folder: Path) -> set[int]:
    """Numbers of the documents that a side wrote."""
    from primus.data import readers as documents

    numbers = set()
    for file in sorted(folder.glob("*.jsonl*")):
        for document in documents.read_documents(file, fields=True):
            assert isinstance(document, documents.TextDocument) and document.fields
            numbers.add(int(document.fields["id"]))
    return numbers


def recall(similarities: dict[tuple[int, int], float], kept: set[int]) -> dict[str, list[float]]:
    """Share of pairs found, and how many pairs there are, by similarity."""
    result = {}
    for low, high in BINS:
        found = [not {one, other} <= kept for (one, other), value in similarities.items() if low <= value < high]
        result[f"{low} to {min(high, 1)}"] = [round(sum(found) / max(len(found), 1), 3), len(found)]
    return result


def agreement(
    similarities: dict[tuple[int, int], float], one: set[int], other: set[int], num_documents: int
) -> dict[str, float]:
    """Share of documents that both keep or both remove: of all, and of the copies by their similarity."""
    differ = one ^ other
    result = {"all": round(1 - len(differ) / num_documents, 4)}
    for low, high in BINS:
        copies = [pair[1] for pair, value in similarities.items() if low <= value < high]
        result[f"{low} to {min(high, 1)}"] = round(sum(copy not in differ for copy in copies) / max(len(copies), 1), 3)
    return result


def precision(removed: set[int], found: list[frozenset[int]]) -> float:
    """Share of removed documents that have a similarity of 0.5 or more to another one."""
    where = defaultdict(list)
    for number, some in enumerate(found):
        for shingle in some:
            where[shingle].append(number)
    good = 0
    for number in removed:
        others = Counter(other for shingle in found[number] for other in where[shingle] if other != number)
        good += any(jaccard(found[number], found[other]) >= 0.5 for other, _ in others.most_common(5))
    return round(good / max(len(removed), 1), 4)


def jaccard(one: frozenset[int], other: frozenset[int]) -> float:
    """Exact similarity of two sets."""
    return len(one & other) / max(len(one | other), 1)


def shingles(documents: list[str]) -> list[frozenset[int]]:
    """Hashes of the shingles of each document."""
    from primus.data.filter.dedup import normalized_words

    result = []
    for text in documents:
        hashes, _ = normalized_words.hash_words([text.encode()])
        size = max(1, min(NGRAM, len(hashes)))
        windows = np.lib.stride_tricks.sliding_window_view(hashes, size)
        factors = np.array([pow(0xD1342543DE82EF95, power, 1 << 64) for power in range(size)], np.uint64)
        result.append(frozenset((windows * factors).sum(axis=1, dtype=np.uint64).tolist()))
    return result


def corpus(megabytes: float, copies: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Real documents with changed copies of some of them, and the pairs of numbers of both."""
    rng = random.Random(1)
    originals = list(dict.fromkeys(cut(rng, megabytes * 1e6)))
    rng.shuffle(originals)
    chosen = rng.sample(range(len(originals)), min(copies, len(originals) // 2))
    places: list[tuple[float, int, str]] = [(float(number), number, text) for number, text in enumerate(originals)]
    for number in chosen:
        place = rng.uniform(number, len(originals))
        places.append((place, -number - 1, change(rng, originals[number], originals[rng.randrange(len(originals))])))
    places.sort()
    numbers = {which: index for index, (_, which, _) in enumerate(places)}
    return [text for _, _, text in places], [(numbers[number], numbers[-number - 1]) for number in chosen]


def change(rng: random.Random, text: str, other: str) -> str:
    """A near copy of one of four kinds."""
    words = text.split(" ")
    kind = rng.randrange(4)
    if kind == 0:
        return re.sub(
            " ", lambda _: rng.choice([" ", "  ", "\n"]), text.upper() if rng.random() < 0.5 else text.lower()
        )
    if kind == 1:
        return text + "\n" + other[: int(len(text) * rng.uniform(0.02, 0.5))]
    rate = rng.uniform(0.005, 0.08)
    pool = other.split() or ["word"]
    return " ".join(rng.choice(pool) if rng.random() < rate else word for word in words)


def cut(rng: random.Random, limit: float) -> Iterator[str]:
    """Documents of log-normal length, cut at paragraphs; 5 in 100 files stay whole."""
    left = limit
    files = [file for place in PLACES for file in sorted(place.rglob("*")) if file.suffix in KINDS and file.is_file()]
    rng.shuffle(files)
    for text in map(read, files):
        length = len(text) if rng.random() < 0.05 else rng.lognormvariate(np.log(MEDIAN_CHARACTERS), 0.8)
        held: list[str] = []
        for paragraph in [*re.split(r"\n\s*\n", text), None]:
            if held and (paragraph is None or sum(map(len, held)) + len(paragraph) > length):
                document = "\n\n".join(held)
                if len(document.split()) >= 2 * NGRAM:
                    yield document
                    left -= len(document)
                held, length = [], rng.lognormvariate(np.log(MEDIAN_CHARACTERS), 0.8)
            held.append(paragraph or "")
        if left < 0:
            return


def read(file: Path) -> str:
    """Text of a file; empty where it is none."""
    import gzip

    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = content.decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return ""
    return re.sub(r"<[^>]*>", "", text) if file.suffix == ".html" else text


if __name__ == "__main__":
    main()
