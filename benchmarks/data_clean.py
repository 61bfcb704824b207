"""Cleaning rules against datatrove: speed of each rule and of FineWeb's chain, and whether the decisions are the same.

    python benchmarks/data_clean.py --rival PYTHON_WITH_DATATROVE

Both sides judge the same real text, cut into documents as long as web pages, in a process each; they take turns.
Rules alone are given texts in memory. The chain (Gopher repetition, Gopher quality, C4, FineWeb quality) is timed in
memory, and from JSON lines to compressed JSON lines; a document goes on until a rule removes it, and words that one
rule has split are used by the next, on both sides. Imports, and the compilation that is kept, stand apart. The
rival's interpreter needs ``datatrove==0.10.1 spacy regex orjson zstandard "xxhash<4"``; its words and sentences in
English are spaCy's, so that no data of nltk is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from data_minhash import cut
from launch_time import HERE
from train_speed import machine

RULES = ("gopher_repetition", "gopher_quality", "c4", "c4_any_line_end", "fineweb_quality", "mc4")
SHOWN = 8

RIVAL = """
import json, resource, sys
from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.filters import (
    C4ParagraphFilter, C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.logging import logger
from datatrove.utils.text import split_into_parts, split_into_words
logger.remove()
file, work = sys.argv[1:]
texts = [json.loads(line)["text"] for line in open(file, encoding="utf-8")]
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
any_end = lambda: C4QualityFilter(filter_no_terminal_punct=False)
rules = {
    "gopher_repetition": GopherRepetitionFilter, "gopher_quality": GopherQualityFilter, "c4": C4QualityFilter,
    "c4_any_line_end": any_end, "fineweb_quality": FineWebQualityFilter, "mc4": C4ParagraphFilter}
def decide(steps):
    decisions, left = [], []
    for text in texts:
        document, verdict = Document(text=text, id=""), True
        for name, step in steps:
            try:
                verdict = step.filter(document)
            except ZeroDivisionError:
                verdict = (False, "it raises ZeroDivisionError")
            if verdict is not True:
                verdict = f"{name}: {verdict[1]}" if isinstance(verdict, tuple) else name
                break
        decisions.append(None if verdict is True else verdict)
        left.append(document.text if verdict is True else None)
    return decisions, left
split_into_words("load the tokenizer before the clock starts")
result = {"cpu_s": {}, "decisions": {}}
for name, make in rules.items():
    split_into_parts.cache_clear()
    step, before = make(), cpu()
    result["decisions"][name], _ = decide([(name, step)])
    result["cpu_s"][name] = cpu() - before
split_into_parts.cache_clear()
fineweb = ("gopher_repetition", "gopher_quality", "c4_any_line_end", "fineweb_quality")
chain = [(name, rules[name]()) for name in fineweb]
before = cpu()
result["decisions"]["chain"], result["left"] = decide(chain)
result["cpu_s"]["chain"] = cpu() - before
split_into_parts.cache_clear()
before = cpu()
try:
    LocalPipelineExecutor(pipeline=[
        JsonlReader(file), GopherRepetitionFilter(), GopherQualityFilter(), any_end(), FineWebQualityFilter(),
        JsonlWriter(f"{work}/kept", compression="zstd")], tasks=1, workers=1, logging_dir=f"{work}/logs").run()
    result["cpu_s"]["chain, files to files"] = cpu() - before
except ZeroDivisionError:
    result["raised"] = "ZeroDivisionError on a document of spaces"
result["words"] = [len(split_into_words(text)) for text in texts]
print(json.dumps(result))
"""

OURS = """
import json, resource, sys
from pathlib import Path
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
before = cpu()
from primus.data.shards import inputs
from primus.data.filter.cleaning import recipe
from primus.data.filter.cleaning import words
from primus.data.filter.cleaning.block import DocumentBlock
from primus.data.filter.cleaning.rules import RULES
from primus.data.filter.cleaning.stage import BLOCK_CHARACTERS, CleanStage
from primus.data.shards.shard_queue import open_shard_queue, process_shards
file, place = sys.argv[1:]
chain = recipe.load_recipe("fineweb")
rules = {name: (RULES[name](),) for name in ("gopher_repetition", "gopher_quality", "c4", "fineweb_quality", "mc4")}
rules["c4_any_line_end"] = (RULES["c4"](terminal_punctuation=False),)
rules["chain"] = chain.rules
stage = CleanStage(["benchmark"], chain)
stage.start()
for some in rules.values():
    for rule in some:
        rule.apply(DocumentBlock(["a word"]))
result = {"cpu_s": {}, "decisions": {}, "start_cpu_s": cpu() - before}
texts = [json.loads(line)["text"] for line in open(file, encoding="utf-8")]
def blocks():
    held, size = [], 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= BLOCK_CHARACTERS:
            yield held
            held, size = [], 0
    if held:
        yield held
def decide(some):
    decisions, left = [], []
    for held in blocks():
        block = DocumentBlock(held)
        for rule in some:
            rule.apply(block)
        found = [None] * len(held)
        for removal in block.removals:
            found[removal.document] = f"{removal.rule}: {removal.reason} {removal.value:.4g}, limit {removal.limit}"
        decisions += found
        left += [None if why else text for why, text in zip(found, block.texts)]
    return decisions, left
for name, some in rules.items():
    before = cpu()
    result["decisions"][name], left = decide(some)
    result["cpu_s"][name] = cpu() - before
    if name == "chain":
        result["left"] = left
source = inputs.open_files((file,))
before = cpu()
board = open_shard_queue(stage, source.shards, Path(place))
assert process_shards(board, lambda counts: None, lambda row: False)
result["cpu_s"]["chain, files to files"] = cpu() - before
result["words"] = []
before = cpu()
for held in blocks():
    result["words"] += DocumentBlock(held).num_words.tolist()
result["cpu_s"]["words"] = cpu() - before
print(json.dumps(result))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", help="interpreter that has datatrove; without it only ours is measured")
    parser.add_argument("--megabytes", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--input", type=Path, help="JSON lines with a field text, instead of the system's documentation"
    )
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        record = measure(Path(place), options)
    text = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"data_clean-{options.machine}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(text + "\n")
    print(f"{text}\nwritten: {output}")


def measure(place: Path, options: argparse.Namespace) -> dict[str, object]:
    """Everything in one run."""
    file = place / "text.jsonl"
    texts = write_corpus(file, options)
    size = sum(len(text.encode()) for text in texts) / 1e6
    fresh = one_run(sys.executable, OURS, file, place / "fresh", {"NUMBA_CACHE_DIR": str(place / "compiled")})
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "datatrove": []}
    for turn in range(options.rounds):
        for side, python, program in (("ours", sys.executable, OURS), ("datatrove", options.rival, RIVAL)):
            if python:
                runs[side].append(one_run(python, program, file, place / f"{side}-{turn}"))
    record: dict[str, object] = {
        "machine": machine(os.cpu_count() or 1),
        "documents": len(texts),
        "megabytes": round(size, 2),
        "start_cpu_s": {
            "compiling": round(fresh["start_cpu_s"], 2),
            "from the cache": round(statistics.median(run["start_cpu_s"] for run in runs["ours"]), 2),
        },
        "mb_per_cpu_s": {side: speeds(size, some) for side, some in runs.items() if some},
    }
    if runs["datatrove"]:
        record |= compared(runs["ours"], runs["datatrove"], texts)
    return record


def write_corpus(file: Path, options: argparse.Namespace) -> list[str]:
    """The texts, and a file of them."""
    if options.input:
        with options.input.open(encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in lines]
    else:
        texts = list(cut(random.Random(1), options.megabytes * 1e6))
    texts = [text for text in texts if text.strip()]
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text, "id": str(number)}) + "\n" for number, text in enumerate(texts))
    return texts


def one_run(python: str, program: str, file: Path, work: Path, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """What a program prints, in a process of its own."""
    work.mkdir()
    done = subprocess.run(
        [python, "-c", program, str(file), str(work)],
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
        env={**os.environ, **(environ or {})},
    )
    if done.returncode:
        sys.exit(f"{python}: {done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def speeds(size: float, runs: list[dict[str, Any]]) -> dict[str, float]:
    """Megabytes of text a CPU second, by rule."""
    return {name: round(size / statistics.median(run["cpu_s"][name] for run in runs), 3) for name in runs[0]["cpu_s"]}


def compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], texts: list[str]) -> dict[str, object]:
    """Ratios of speeds, and where decisions differ."""
    mine, other = ours[0], theirs[0]
    ratios = {
        name: round(
            statistics.median(b["cpu_s"][name] / a["cpu_s"][name] for a, b in zip(ours, theirs, strict=True)), 1
        )
        for name in other["cpu_s"]
    }
    agreement, differences = {}, {}
    for name in (*RULES, "chain"):
        pairs = list(zip(mine["decisions"][name], other["decisions"][name], strict=True))
        differ = [number for number, (a, b) in enumerate(pairs) if (a is None) != (b is None)]
        agreement[name] = {
            "same": f"{100 * (1 - len(differ) / len(pairs)):.2f} %",
            "kept by both": sum(a is None and b is None for a, b in pairs),
            "removed by both": sum(a is not None and b is not None for a, b in pairs),
        }
        differences[name] = [
            {
                "ours": mine["decisions"][name][number] or "kept",
                "datatrove": other["decisions"][name][number] or "kept",
                "words": [mine["words"][number], other["words"][number]],
                "text": texts[number][:80],
            }
            for number in differ[:SHOWN]
        ]
    equal = [a == b for a, b in zip(mine["left"], other["left"], strict=True) if a is not None and b is not None]
    words = Counter(a == b for a, b in zip(mine["words"], other["words"], strict=True))
    return {
        "ratio": ratios,
        "agreement": agreement,
        "texts that both keep and leave equal": f"{sum(equal)} of {len(equal)}",
        "documents with as many words": f"{words[True]} of {len(texts)}",
        "differences": differences,
        **({"datatrove raised": other["raised"]} if "raised" in other else {}),
    }


if __name__ == "__main__":
    main()
