"""Lists the samples of a training step: the source of their tokens, and the masked positions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from msgspec import Struct

from primus.config import checks
from primus.config.schema import Experiment, Trainer
from primus.data.megatron.indexed_dataset import IndexedTokens
from primus.data.tokenizers.load import load_tokenizer
from primus.data.training.dataset import Datasets, describe_change
from primus.data.training.loader import list_samples_of_step, num_micro_batches
from primus.data.training.masks import split_inputs_and_targets
from primus.data.training.packing import Piece
from primus.errors import UnfitError, UsageError
from primus.runs import events
from primus.runs.store import Run


class InspectedStep(Struct, frozen=True, kw_only=True):
    """The samples of a step, and their division among ranks and micro batches."""

    step: int
    """Number of the step, counted from 1."""
    first_sample: int
    """Number of its first sample."""
    global_batch_size: int
    """Samples in the step."""
    micro_batch_size: int
    """Samples in a micro batch."""
    world_size: int
    """Number of data-parallel ranks."""
    recorded: bool
    """Whether the values are recorded by a run; else they follow from the experiment."""

    def locate_sample(self, sample: int) -> tuple[int, int]:
        """Rank and micro batch of a sample."""
        micro_batch, rank = divmod((sample - self.first_sample) // self.micro_batch_size, self.world_size)
        return rank, micro_batch


class SampleSpan(Struct, frozen=True, kw_only=True):
    """Consecutive tokens of a sample that come from one sequence of a token file."""

    prefix: str
    """The token file."""
    document: int
    """Number of the document in it."""
    sequence: int
    """Number of the sequence in it, which differs from the document's if long documents are cut."""
    first_token: int
    """First token within the sequence."""
    tokens: int
    """Number of tokens."""


class TrainingSample(Struct, frozen=True, kw_only=True):
    """One sample."""

    sample: int
    """Number of the sample in the order of the run."""
    rank: int
    """Data-parallel rank that trains on it."""
    micro_batch: int
    """Micro batch of the step."""
    parts: list[SampleSpan]
    """Where its tokens come from, in order; empty for random tokens."""
    ids: list[int]
    """Its seq_length + 1 tokens: inputs, and targets one later."""
    masked: list[int]
    """Positions of inputs whose target is masked."""
    text: str | None
    """Decoded text; None if the tokenizer is unknown."""


def plan_step(experiment: Experiment, step: int, world_size: int) -> InspectedStep:
    """The samples of a step according to the experiment, for a run that skips no data.

    Raises:
        UsageError: The batch does not divide among the ranks.
    """
    training = experiment.trainer.training
    ranks = checks.data_parallel_size(experiment.trainer.parallel, world_size)
    size = training.global_batch_size or training.micro_batch_size * ranks
    num_micro_batches(size, training.micro_batch_size, ranks)
    return InspectedStep(
        step=step,
        first_sample=list_samples_of_step(step, size).start,
        global_batch_size=size,
        micro_batch_size=training.micro_batch_size,
        world_size=ranks,
        recorded=False,
    )


def find_step_of_sample(run: Run, sample: int) -> int:
    """The step in which a run trained on a sample.

    Raises:
        UsageError: No step has this sample.
    """
    for event in events.read_steps(run.events):
        if event["consumed_samples"] - event["global_batch_size"] <= sample < event["consumed_samples"]:
            return int(event["step"])
    raise UsageError(f"{run.directory}: no step has trained on sample {sample:,}", "see the steps with `runs show`")


def find_recorded_step(run: Run, experiment: Experiment, step: int) -> tuple[InspectedStep, str]:
    """The samples of a step as recorded by a run, and the fingerprint of its data.

    Raises:
        UsageError: The run has not reached this step.
    """
    started: events.Event = {}
    found: tuple[events.Event, events.Event] | None = None
    last = 0
    for event in events.read_events(run.events):
        if event["kind"] == "run_started":
            started = event
        # A rewind discards the steps after its target: a record of the step from before the rewind is not valid.
        elif event["kind"] == "rewind" and found and event.get("to_step", step) < step:
            found = None
        elif event["kind"] == "step":
            # A restarted run records a step again; the last record is the valid one.
            last = max(last, event["step"])
            found = (event, started) if event["step"] == step else found
    if not found:
        raise UsageError(
            f"{run.directory}: step {step:,} is not recorded, the last is {last:,}",
            "give --config instead of --run to see what an experiment will train on",
        )
    taken, started = found
    training, size = experiment.trainer.training, taken["global_batch_size"]
    ranks = checks.data_parallel_size(experiment.trainer.parallel, started.get("world_size", 1))
    chosen = InspectedStep(
        step=step,
        first_sample=taken["consumed_samples"] - size,
        global_batch_size=size,
        micro_batch_size=training.micro_batch_size,
        world_size=ranks,
        recorded=True,
    )
    return chosen, str(started.get("data_fingerprint", ""))


def check_recorded(data: Datasets, recorded: str) -> None:
    """Compare the data with those of a run by the fingerprint that it has recorded; none if empty.

    Raises:
        UnfitError: The data differs.
    """
    if recorded and recorded != data.fingerprint:
        raise UnfitError(
            f"the data is not what the run was trained on: its fingerprint is {data.fingerprint}, not {recorded}"
            f" ({describe_change(recorded, data.fingerprint)})",
            "restore the files; `data verify` shows whether they are damaged",
        )


def read_samples(
    step: InspectedStep, data: Datasets, trainer: Trainer, numbers: Sequence[int]
) -> Iterator[TrainingSample]:
    """Yield the samples with these numbers, exactly as training reads them."""
    tokenizer = load_tokenizer(data.tokenizer_path, fast=False) if data.tokenizer_path else None
    masked_input = data.eod_id if trainer.data.eod_mask_loss else None
    for number in numbers:
        sample = data.train[number]
        # Instruction data [3, S + 1]: ids, whether the prediction of each counts, its example.
        tokens, is_counted = (sample[0], sample[1]) if sample.ndim == 2 else (sample, np.ones_like(sample))
        _, targets = split_inputs_and_targets(tokens[None], masked_input)
        rank, micro_batch = step.locate_sample(number)
        yield TrainingSample(
            sample=number,
            rank=rank,
            micro_batch=micro_batch,
            parts=[_describe_piece(piece) for piece in data.train.find_pieces(number)],
            ids=tokens.tolist(),
            masked=np.flatnonzero((targets[0] < 0) | (is_counted[1:] == 0)).tolist(),
            text=tokenizer.decode_valid(tokens.tolist()) if tokenizer else None,
        )


def _describe_piece(piece: Piece) -> SampleSpan:
    return SampleSpan(
        prefix=str(piece.prefix),
        document=bisect_right(_open_tokens(piece.prefix).borders, piece.sequence) - 1,
        sequence=piece.sequence,
        first_token=piece.first_token,
        tokens=piece.tokens,
    )


@cache
def _open_tokens(prefix: Path) -> IndexedTokens:
    return IndexedTokens(prefix)
