"""Texts to tokens in batches, in this process or in several, in order and in constant memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primus.data import tokenizer as tokenizers
from primus.data.documents import Text
from primus.data.indexed import smallest_dtype
from primus.data.manifest import Recipe
from primus.data.tokenizer import Tokenizer
from primus.errors import PrimusError

BATCH_CHARACTERS = 1 << 20
BATCH_TEXTS = 2048


@dataclass(frozen=True)
class Encoded:
    """A batch of sequences."""

    tokens: NDArray[Any]
    """[sum of lengths] ids, one sequence after the other."""
    lengths: NDArray[np.int32]
    """[n] tokens of each sequence."""
    ends_document: NDArray[np.bool_]
    """[n] whether a sequence is the last of its document."""
    characters: int
    """Length of the texts."""
    empty: int
    """Documents without text, which have no sequence."""
    special_strings: int
    """How often a text spells out the end-of-document token."""


def encode(texts: Iterable[Text], tokenizer: Tokenizer, recipe: Recipe, num_workers: int = 1) -> Iterator[Encoded]:
    """The tokens of `texts` in their order, the same for any number of workers.

    Args:
        texts: Documents and pieces of documents.
        tokenizer: The tokenizer.
        recipe: What to add to a document.
        num_workers: Processes; 1 is this one.

    Raises:
        PrimusError: A worker process died.
    """
    batches = _batches(texts)
    if num_workers == 1:
        yield from (encode_batch(batch, tokenizer, recipe) for batch in batches)
        return
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.content, tokenizer.name, tokenizer.eod, recipe),
    )
    try:
        yield from _in_order(pool, batches, 2 * num_workers)
    except BrokenProcessPool:
        raise PrimusError("a tokenizing process died, perhaps for lack of memory", "use fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode_batch(texts: list[Text], tokenizer: Tokenizer, recipe: Recipe) -> Encoded:
    """The tokens of one batch."""
    kept = [text for text in texts if text.text or not (text.begins and text.ends)]
    strings = [text.text for text in kept]
    tokens, lengths = tokenizer.encode_batch(strings, recipe.add_special_tokens)
    sequences = np.split(tokens, np.cumsum(lengths)[:-1]) if strings else []
    if recipe.append_eod:
        sequences = [
            _with_eod(ids, tokenizer.eod_id) if text.ends else ids for ids, text in zip(sequences, kept, strict=True)
        ]
    dtype = smallest_dtype(tokenizer.vocab_size)
    return Encoded(
        tokens=np.concatenate(sequences).astype(dtype) if sequences else np.empty(0, dtype),
        lengths=np.array([len(ids) for ids in sequences], dtype=np.int32),
        ends_document=np.array([text.ends for text in kept], dtype=np.bool_),
        characters=sum(map(len, strings)),
        empty=len(texts) - len(kept),
        special_strings=sum(text.count(tokenizer.eod) for text in strings) if tokenizer.eod else 0,
    )


def _with_eod(ids: NDArray[Any], eod_id: int | None) -> NDArray[Any]:
    """The ids with one end-of-document token at their end, also where the tokenizer's template has added it."""
    assert eod_id is not None
    return ids if len(ids) and ids[-1] == eod_id else np.append(ids, eod_id)


def _batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    batch: list[Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_order(pool: ProcessPoolExecutor, batches: Iterator[list[Text]], depth: int) -> Iterator[Encoded]:
    """Results in the order of the batches, of which at most `depth` are in memory."""
    ahead: deque[Future[Encoded]] = deque()
    for batch in batches:
        ahead.append(pool.submit(_work, batch))
        if len(ahead) == depth:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


_worker: dict[str, Any] = {}
"""Tokenizer and recipe of a worker process."""


def _start_worker(content: bytes, name: str, eod: str | None, recipe: Recipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker["tokenizer"] = tokenizers.from_content(content, name, eod, recipe.parse_special_tokens)
    _worker["recipe"] = recipe


def _exit_with_parent() -> None:
    """A killed parent leaves no orphan waiting for work."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _work(batch: list[Text]) -> Encoded:
    return encode_batch(batch, _worker["tokenizer"], _worker["recipe"])
