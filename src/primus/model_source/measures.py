"""What a model is evaluated by: the loss on held-out data, and answers that match."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from primus.errors import UsageError
from primus.model_source.text_model import AnswerStyle, TextModel, read_prompts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from primus.config.schema import Trainer
    from primus.data.instruction.examples import Message

LARGEST_EXPONENT = 20.0
"""Perplexity is e to the loss, at most to this, as in the events of training."""

Row = TypeVar("Row")


class HeldOutText(NamedTuple):
    """A text, or a piece of one."""

    tokens: Sequence[int]
    is_counted: Sequence[bool]
    """Tokens whose prediction counts."""


def measure_validation(model: TextModel, trainer: Trainer, num_samples: int | None) -> dict[str, float]:
    """The loss on the validation data of a run, computed as the run computes it.

    Args:
        model: The checkpoint.
        trainer: The settings of the run.
        num_samples: Samples from the first one on; those that training evaluates when None.

    Raises:
        UsageError: The data do not exist, or are pairs of answers.
    """
    from primus.checkpoint.manifest import read_manifest
    from primus.data.instruction.preference_settings import learns_preferences
    from primus.data.open_samples import open_samples

    if learns_preferences(trainer.backend_args):
        raise UsageError("the run learns preferences: its data are pairs of answers", "give --data FILE with answers")
    data, training = open_samples(trainer), trainer.training
    valid = data.valid
    if valid is None:
        raise UsageError(f"the run has no validation data: {data.no_valid}", "give --data FILE")
    place = model.opened.found.folder
    saved = read_manifest(place.parent if model.opened.found.format == "peft" else place)
    batch = training.global_batch_size or (saved and saved.global_batch_size) or training.micro_batch_size
    wanted = num_samples or training.eval_iters * batch or valid.samples_per_epoch
    samples = (valid[index] for index in range(wanted))
    loss, tokens = model.native.evaluate(_stack_samples(samples, training.micro_batch_size), trainer, data.eod_id)
    return {**_build_loss_metrics(loss, tokens), "samples": wanted}


def measure_texts(model: TextModel, source: str, seq_length: int, batch_size: int) -> dict[str, float]:
    """The loss on a file: of a text the tokens after the first one, of rows of post-training those of answers.

    Args:
        model: The checkpoint.
        source: A text file, or JSONL with a `text` in each row or with the columns of post-training.
        seq_length: Tokens that a prediction sees at most.
        batch_size: Pieces that are computed at once.

    Raises:
        UsageError: The file does not exist or is damaged, or nothing in it counts.
    """
    texts, num_bytes = _read_held_out(model, source)
    pieces = [piece for text in texts for piece in _cut_text(text, seq_length) if any(piece.is_counted)]
    pieces.sort(key=lambda piece: len(piece.tokens))  # a batch has little padding
    if not pieces:
        raise UsageError(f"{source}: nothing to predict", "a text needs two tokens at least")
    losses, tokens = [], 0
    for batch in _split_batches(pieces, batch_size):
        for score in model.native.score([each.tokens for each in batch], [each.is_counted for each in batch]):
            losses.append(-float(score.log_probabilities.sum()))
            tokens += len(score.log_probabilities)
    loss = math.fsum(losses)
    found = {**_build_loss_metrics(loss, tokens), "texts": len(texts)}
    return found | ({"bits_per_byte": loss / math.log(2) / num_bytes} if num_bytes else {})


def measure_matches(model: TextModel, source: str, style: AnswerStyle, batch_size: int) -> dict[str, float]:
    """The share of answers that equal the `answer` of their row, without white space around both.

    Raises:
        UsageError: The file does not exist, or a row has no prompt or no answer; names the line.
    """
    rows: list[tuple[str | list[Message], str]] = []
    for prompt, row, where in read_prompts(source, "--exact-match"):
        if not isinstance(row.get("answer"), str | int | float):
            raise UsageError(f"{where}: a row needs an answer", 'write {"prompt": TEXT, "answer": TEXT}')
        rows.append((prompt, str(row["answer"]).strip()))
    matches, first = 0, 0
    for batch in _split_batches(rows, batch_size):
        answers = model.answer([prompt for prompt, _ in batch], style, first)
        matches += sum(found.text.strip() == wanted for found, (_, wanted) in zip(answers, batch, strict=True))
        first += len(batch)
    return {"exact_match": matches / len(rows), "matches": matches, "prompts": len(rows)}


def _build_loss_metrics(loss: float, tokens: int) -> dict[str, float]:
    mean = loss / max(tokens, 1)
    return {"loss": mean, "perplexity": math.exp(min(LARGEST_EXPONENT, mean)), "tokens": tokens}


def _stack_samples(samples: Iterator[NDArray[np.int64]], size: int) -> Iterator[NDArray[np.int64]]:
    import numpy

    while batch := list(islice(samples, size)):
        yield numpy.stack(batch)


def _split_batches(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


def _read_held_out(model: TextModel, source: str) -> tuple[list[HeldOutText], int]:
    """The texts of a file, and their bytes; these are 0 for rows of post-training."""
    from primus.data.instruction.examples import parse_example, read_rows

    rows = enumerate(read_rows(source), 1) if source.endswith(".jsonl") else [(1, {"text": _read_text(source)})]
    found, num_bytes = [], 0
    for number, row in rows:
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            ids = model.encode_text(row["text"])
            found.append(HeldOutText(ids, [True] * len(ids)))
            num_bytes += len(row["text"].encode())
        else:
            where = f"{source}:{number}"
            example = model.encoder.encode(parse_example(row, where), where)
            found.append(HeldOutText(example.tokens.tolist(), example.is_counted.tolist()))
    return found, num_bytes


def _read_text(source: str) -> str:
    path = Path(os.path.expanduser(source))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}", "name a text or a JSONL file in --data") from None


def _cut_text(text: HeldOutText, length: int) -> Iterator[HeldOutText]:
    """Pieces of `length` + 1 tokens: the last token of one is the first of the next, where nothing predicts it."""
    for begin in range(0, len(text.tokens), length):
        part = slice(begin, begin + length + 1)
        yield HeldOutText(text.tokens[part], [False, *text.is_counted[part][1:]])
