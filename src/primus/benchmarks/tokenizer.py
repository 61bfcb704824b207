"""Encoding of text by a tokenizer: tokens/s."""

from __future__ import annotations

import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, structs

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow
from primus.errors import UsageError


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark tokenizer`."""

    tokenizer: str | None = None
    """Tokenizer: a file, a folder, or a name on the Hub."""
    input: str | None = None
    """Text file (default: the sources of Python's standard library)."""
    mib: Annotated[float, Meta(gt=0)] = 8.0
    """Text to encode, in MiB."""


def check_options(options: Options) -> None:
    """Refuse a missing tokenizer or text."""
    if options.tokenizer is None:
        raise UsageError("benchmark tokenizer needs --tokenizer", "a file, a folder, or a name on the Hub")
    is_path = options.tokenizer.startswith((".", "/", "~")) or options.tokenizer.endswith(".json")
    if is_path and not Path(os.path.expanduser(options.tokenizer)).exists():
        raise UsageError(f"--tokenizer {options.tokenizer}: does not exist")
    if options.input is not None and not Path(options.input).is_file():
        raise UsageError(f"--input {options.input}: not a file")


def _read_texts(options: Options) -> list[str]:
    """Documents of together at most `--mib`; 0.25 with --quick."""
    left = int((min(options.mib, 0.25) if options.quick else options.mib) * 2**20)
    if options.input is not None:
        files = [Path(options.input)]
    else:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = []
    for file in files:
        if left <= 0:
            break
        with file.open("rb") as source:
            texts.append(source.read(left).decode("utf-8", "ignore"))
        left -= len(texts[-1].encode())
    return [text for text in texts if text]


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """One row; each rank encodes the same text."""
    from primus.data.tokenizers.load import load_tokenizer
    from primus.measure.storage.timed_passes import PassAmount, measure_passes

    assert options.tokenizer is not None
    tokenizer, texts = load_tokenizer(options.tokenizer), _read_texts(options)
    text_bytes = sum(len(text.encode()) for text in texts)

    def run_pass() -> float:
        started = time.perf_counter()
        tokenizer.encode_batch(texts)
        return time.perf_counter() - started

    tokens = len(tokenizer.encode_batch(texts)[0])
    row = measure_passes(
        context,
        {"tokenizer": options.tokenizer, "documents": len(texts), "text_mib": round(text_bytes / 2**20, 3)},
        run_pass,
        PassAmount(
            float(tokens), "tokens/s", "tokens of all documents / median time of a batch; all CPUs of this process"
        ),
        longest_s=min(options.duration, 0.2) if options.quick else options.duration,
    )
    if row.timing is not None:
        seconds = row.timing.median_s
        row = structs.replace(
            row, figures={"text_mb_per_s": text_bytes / seconds / 1e6, "bytes_per_token": text_bytes / tokens}
        )
    yield row
