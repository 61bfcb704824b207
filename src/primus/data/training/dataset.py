"""Opens the training, validation and test samples of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from primus.config.schema import DataConfig
from primus.config.token_files import SHARES, parse_split, parse_weighted_prefixes
from primus.data.mask_report import MaskReport
from primus.data.megatron import manifest as manifests
from primus.data.megatron.indexed_dataset import IndexedTokens
from primus.data.megatron.manifest import TokenFileManifest
from primus.data.prepare import named_dataset
from primus.data.training.blending import BlendedDataset
from primus.data.training.infilling import InfilledDataset, Infilling
from primus.data.training.mock import MockDataset
from primus.data.training.packing import CACHED_BLOCKS, ORDER, Dataset, PackedDataset
from primus.errors import UsageError

if TYPE_CHECKING:
    from primus.data.tokenizers.tokenizer import Tokenizer

VALID_SEED, TEST_SEED = 1, 2
"""Offsets of the seed for the order of validation and test data."""

MOCK_EOD = 0
"""End-of-document token of random tokens, for settings that need documents."""

NEED_ENDS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_rate")
"""Settings that require an end-of-document token after each document."""

LOOKED_AT, LOOKED_AT_TOKENS = 256, 4096
"""Parts of a file, and tokens of each, that are searched for the end-of-document token if no manifest states it."""

FEWEST_CACHED_BLOCKS = 64
"""Minimum blocks that each corpus of a blend keeps in memory."""


@dataclass(frozen=True)
class Datasets:
    """Samples of an experiment for training, validation and test."""

    train: Dataset
    """Training samples."""
    valid: Dataset | None
    """Validation samples; None if there are none."""
    no_valid: str
    """Reason for the absence of validation samples."""
    test: Dataset | None
    """Test samples; None if there are none."""
    tokenizer_path: str | None
    """Argument of `load_tokenizer` for the tokenizer of the data; None if it is unknown."""
    eod_id: int | None
    """Id of the end-of-document token; None if it is unknown."""
    fingerprint: str
    """Hash of the tokens and their split, with the version of the order."""
    num_examples: int = 0
    """Examples in the files of instruction data."""
    mask_reports: tuple[MaskReport, ...] = ()
    """What counts in the loss, by file of instruction data."""


@dataclass(frozen=True)
class TokenFile:
    """An opened token file with its manifest and weight."""

    tokens: IndexedTokens
    manifest: TokenFileManifest | None
    weight: float | None = None


def open_datasets(data: DataConfig, vocab_size: int, seq_length: int, seed: int) -> Datasets:
    """Open the samples of `data`: ``seq_length + 1`` tokens each, with ids below `vocab_size`.

    A named dataset is prepared on first use. Of several processes that start together, one prepares it and the others
    wait.

    Raises:
        UsageError: The settings contradict each other, a file is missing or damaged, there are too few tokens, or the
            tokenizer differs from that of the data or exceeds the model's vocabulary.
    """
    if data.create_attention_mask_in_dataloader:
        raise UsageError(
            "create_attention_mask_in_dataloader: true, but the loader makes no masks",
            "remove it; `reset_attention_mask: true` keeps documents apart",
        )
    if data.mock_data:
        return _open_mock(data, vocab_size, seq_length, seed)
    shares = parse_split(data.split)
    train = [_open_token_file(prefix, weight) for prefix, weight in _train_prefixes(data, vocab_size)]
    valid = [
        _open_token_file(prefix, weight)
        for prefix, weight in parse_weighted_prefixes(data.valid_data_path, "valid_data_path")
    ]
    test = [
        _open_token_file(prefix, weight)
        for prefix, weight in parse_weighted_prefixes(data.test_data_path, "test_data_path")
    ]
    files = [*train, *valid, *test]
    path, eod_id = _check_tokenizer(data, files, vocab_size)
    settings = _DatasetSettings(
        seq_length, seed, vocab_size, _build_infilling(data, path, eod_id, vocab_size), CACHED_BLOCKS // len(files)
    )
    of_split = None if valid or test else shares
    valid_set, no_valid = _open_held_out(train, valid, of_split, 1, settings.with_seed(VALID_SEED))
    return Datasets(
        train=_blend_files(train, of_split, 0, settings),
        valid=valid_set,
        no_valid=no_valid,
        test=_open_held_out(train, test, of_split, 2, settings.with_seed(TEST_SEED))[0],
        tokenizer_path=path,
        eod_id=eod_id,
        fingerprint=_compute_fingerprint(data, train, valid, test),
    )


def describe_change(before: str, now: str) -> str:
    """Describe the difference between two fingerprints."""
    if before.partition("-")[0] == now.partition("-")[0]:
        return "the order of the samples differs: dataloader, or the version of primus, has changed"
    return "the training data differs"


@dataclass(frozen=True)
class _DatasetSettings:
    seq_length: int
    seed: int
    vocab_size: int
    infilling: Infilling | None
    cached_blocks: int

    def with_seed(self, seed: int) -> _DatasetSettings:
        return replace(self, seed=self.seed + seed)


def _open_mock(data: DataConfig, vocab_size: int, seq_length: int, seed: int) -> Datasets:
    if data.fim_rate:
        raise UsageError("fim_rate: random tokens have no documents to rearrange", "set fim_rate to 0 with mock_data")
    return Datasets(
        train=MockDataset(vocab_size, seq_length, seed),
        valid=MockDataset(vocab_size, seq_length, seed + VALID_SEED),
        no_valid="",
        test=None,
        tokenizer_path=None,
        eod_id=MOCK_EOD if data.reset_position_ids or data.reset_attention_mask else None,
        fingerprint=f"mock:{vocab_size}:{seq_length}",
    )


def _train_prefixes(data: DataConfig, vocab_size: int) -> list[tuple[Path, float | None]]:
    if data.dataset and data.train_data_path:
        raise UsageError("both dataset and train_data_path are set", "set one of them to null")
    if data.dataset:
        return [(named_dataset.ensure_dataset(data, vocab_size), None)]
    if not data.train_data_path:
        raise UsageError("no data to train on", "set dataset, train_data_path, or mock_data for random tokens")
    return parse_weighted_prefixes(data.train_data_path, "train_data_path")


def _open_token_file(prefix: Path, weight: float | None) -> TokenFile:
    return TokenFile(IndexedTokens(prefix), manifests.read_manifest(prefix), weight)


def _open_held_out(
    train: list[TokenFile], own: list[TokenFile], shares: Sequence[float] | None, share: int, settings: _DatasetSettings
) -> tuple[Dataset | None, str]:
    """Validation or test samples, or the reason for their absence. Too few tokens are an error only on use."""
    if own:
        return _blend_files(own, None, 0, settings), ""
    if shares is None or shares[share] == 0:
        return None, f"split leaves no documents for {SHARES[share]}" if shares else f"no {SHARES[share]} data is named"
    try:
        return _blend_files(train, shares, share, settings), ""
    except UsageError as error:
        return None, error.problem


def _blend_files(
    files: list[TokenFile], shares: Sequence[float] | None, share: int, settings: _DatasetSettings
) -> Dataset:
    """Samples of one share of each file, or of the whole files if `shares` is None."""
    packed = [_pack_file(file, shares, share, settings) for file in files]
    dataset: Dataset = packed[0]
    # Without weights, files are blended in proportion to their size, so that one epoch has all samples once.
    if len(packed) > 1:
        sizes = [file.weight or one.samples_per_epoch for file, one in zip(files, packed, strict=True)]
        dataset = BlendedDataset(packed, sizes)
    return InfilledDataset(dataset, settings.infilling, settings.seed) if settings.infilling else dataset


def _pack_file(
    file: TokenFile, shares: Sequence[float] | None, share: int, settings: _DatasetSettings
) -> PackedDataset:
    borders = split_borders(len(file.tokens), shares) if shares else [0, len(file.tokens)]
    first, last = borders[share], borders[share + 1]
    if first == last:
        raise UsageError(
            f"{file.tokens.prefix}: no {SHARES[share]} documents in a split of {len(file.tokens)}",
            "use more documents or another split",
        )
    # The blocks in memory are divided among the files of a blend, since a window of each file is read at the same time.
    cached_blocks = max(FEWEST_CACHED_BLOCKS, settings.cached_blocks)
    sequences = range(first, last)
    return PackedDataset(file.tokens, settings.seq_length, settings.seed, sequences, settings.vocab_size, cached_blocks)


def split_borders(count: int, shares: Sequence[float]) -> list[int]:
    """First of `count` sequences of each share, and the end.

    The borders are rounded as in Megatron-LM (megatron/core/datasets/blended_megatron_dataset_builder.py), but a share
    above 0 has at least one sequence if there are enough.
    """
    # Rounding the cumulative shares, as in Megatron-LM, leaves no sequence without a share.
    ends = [round(count * sum(shares[: index + 1])) for index in range(len(shares))]
    sizes = [end - start for start, end in pairwise([0, *ends])]
    for index, share in enumerate(shares):
        # A small file may round a share to nothing; the largest share gives one sequence.
        largest = sizes.index(max(sizes))
        if share > 0 and sizes[index] == 0 and sizes[largest] > 1:
            sizes[index], sizes[largest] = 1, sizes[largest] - 1
    return [0, *accumulate(sizes)]


def _build_infilling(data: DataConfig, tokenizer: str | None, eod_id: int | None, vocab_size: int) -> Infilling | None:
    """Infilling of the `fim_` settings; None if `fim_rate` is 0."""
    if data.fim_rate == 0:
        return None
    assert tokenizer is not None and eod_id is not None, "_check_ends has found them"
    prefix_id, middle_id, suffix_id = (
        _find_token_id(data, key, tokenizer, vocab_size)
        for key in ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")
    )
    return Infilling(data.fim_rate, data.fim_spm_rate, prefix_id, middle_id, suffix_id, eod_id)


def _find_token_id(data: DataConfig, key: str, tokenizer: str, vocab_size: int) -> int:
    """Id of the token that a setting names."""
    from primus.data.tokenizers.load import load_tokenizer  # most workers read token files only

    token = getattr(data, key)
    try:
        token_id = load_tokenizer(tokenizer, eod=token, fast=False).eod_id
    except UsageError as error:
        hint = f"name a token that the tokenizer has, or set fim_rate to 0 ({error.hint})"
        raise UsageError(f"{key}: {error.problem}", hint) from None
    assert token_id is not None, "load has found it"
    _check_size(f"{tokenizer} with {token}", token_id + 1, vocab_size)
    return token_id


def _check_tokenizer(data: DataConfig, files: list[TokenFile], vocab_size: int) -> tuple[str | None, int | None]:
    """Argument of `load_tokenizer` for the tokenizer of the data, and its end-of-document id.

    Raises:
        UsageError: The data has several tokenizers, another than the experiment's, or one larger than the model.
    """
    known = [(file.tokens.prefix, file.manifest.tokenizer) for file in files if file.manifest]
    asked = _load_named_tokenizer(data, [facts.name for _, facts in known])
    for prefix, facts in known:
        first_prefix, first = known[0]
        if facts.fingerprint != first.fingerprint:
            raise UsageError(
                f"{prefix} has the tokenizer {facts.name}, but {first_prefix} has {first.name}",
                "prepare both with one tokenizer",
            )
        if asked and facts.fingerprint != asked.fingerprint:
            raise UsageError(
                f"{prefix} was prepared with the tokenizer {facts.name}, which is not {data.tokenizer_model}",
                "remove tokenizer_model to use the data's own, or prepare the data with this one",
            )
        _check_size(facts.name, facts.vocab_size, vocab_size)
    if asked:
        _check_size(asked.name, asked.vocab_size, vocab_size)
    path = data.tokenizer_model
    eod_id = asked.eod_id if asked else None
    if known:
        prefix, facts = known[0]
        path, eod_id = str(prefix.parent / facts.file), facts.eod_id
    _check_ends(data, files, eod_id)
    return path, eod_id


def _check_ends(data: DataConfig, files: list[TokenFile], eod_id: int | None) -> None:
    """Check that the files have end-of-document tokens, if a setting needs them.

    Raises:
        UsageError: The token is unknown, or is not in a file.
    """
    key = next((key for key in NEED_ENDS if getattr(data, key)), None)
    if key is None:
        return
    if eod_id is None:
        raise UsageError(f"{key}: the end-of-document token of the data is not known", "set tokenizer_model")
    for file in files:
        is_written = file.manifest and file.manifest.recipe.append_eod
        if not is_written and not _contains_token(file.tokens.tokens, eod_id):
            raise UsageError(
                f"{key}: token {eod_id}, the end of a document, does not occur in {file.tokens.prefix}.bin",
                "set tokenizer_model to the tokenizer that the data was made with, or make it with --append-eod",
            )


def _contains_token(tokens: NDArray[Any], token: int) -> bool:
    """Whether a token occurs in a small file, or in evenly spread parts of a large one, including its end."""
    if len(tokens) <= LOOKED_AT * LOOKED_AT_TOKENS:
        return bool((tokens == token).any())
    # A sample is enough: a file whose documents end with the token has it in nearly every part.
    starts = np.linspace(0, len(tokens) - LOOKED_AT_TOKENS, LOOKED_AT).astype(np.int64).tolist()
    return any((tokens[start : start + LOOKED_AT_TOKENS] == token).any() for start in starts)


def _load_named_tokenizer(data: DataConfig, known_names: list[str]) -> Tokenizer | None:
    """The tokenizer that the experiment names; None if it is the hub name with which all data was prepared."""
    name = data.tokenizer_model
    if not name:
        return None
    from primus.data.tokenizers.load import check_tokenizer_type, load_tokenizer  # most workers read token files only
    from primus.data.tokenizers.locate import is_local

    if known_names and set(known_names) == {name} and not is_local(name):
        return None
    of_megatron = not known_names and data.tokenizer_type == "HuggingFaceTokenizer"
    return check_tokenizer_type(load_tokenizer(name, follow_declared=of_megatron), data.tokenizer_type)


def _check_size(name: str, size: int, vocab_size: int) -> None:
    if size > vocab_size:
        raise UsageError(
            f"the tokenizer {name} has ids up to {size - 1}, but the model's vocab_size is {vocab_size}",
            f"set vocab_size to {size} or more, or prepare the data with the model's own tokenizer",
        )


def _compute_fingerprint(
    data: DataConfig, train: list[TokenFile], valid: list[TokenFile], test: list[TokenFile]
) -> str:
    parts = []
    for role, files in (("train", train), ("valid", valid), ("test", test)):
        for file in files:
            # Contents, not paths: a run resumes after its files were moved.
            parts += [role, str(file.weight), manifests.fingerprint_tokens(file.tokens.prefix, file.manifest)]
    return f"{manifests.combine_fingerprints(*parts, *([] if valid or test else [data.split]))}-{ORDER}"
