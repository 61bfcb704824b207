"""Training and validation samples of an experiment, from its data settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from primus.config.schema import DataConfig
from primus.data import manifest as manifests
from primus.data import named
from primus.data import tokenizer as tokenizers
from primus.data.blending import BlendedDataset
from primus.data.indexed import IndexedTokens, bin_path, idx_path
from primus.data.manifest import Manifest
from primus.data.mock import MockDataset
from primus.data.packing import Dataset, PackedDataset
from primus.data.tokenizer import Tokenizer
from primus.errors import UsageError, did_you_mean

VALID_SEED = 1
"""Added to the seed for the order of the validation data."""

SHARES = ("training", "validation", "test")


@dataclass(frozen=True)
class Datasets:
    """What an experiment trains on and validates with."""

    train: Dataset
    """Training samples."""
    valid: Dataset | None
    """Validation samples; None where there are none."""
    no_valid: str
    """Why there are none."""
    tokenizer_path: str | None
    """What `primus.data.tokenizer.load` makes the tokenizer of the data from; None where it is not known."""
    eod_id: int | None
    """Id of the token that ends a document; None where it is not known."""
    fingerprint: str
    """Identity of the tokens and of their split."""


@dataclass(frozen=True)
class TokenFile:
    """One opened prefix with what is known about it."""

    tokens: IndexedTokens
    manifest: Manifest | None
    weight: float | None = None


def open_datasets(data: DataConfig, vocab_size: int, seq_length: int, seed: int) -> Datasets:
    """Samples of ``seq_length + 1`` tokens as `data` asks for, whose ids are below `vocab_size`.

    A named dataset is prepared on first use; of several processes that start together one does it and the others wait.

    Raises:
        UsageError: The settings contradict each other, files are missing or damaged, there are too few tokens, or the
            tokenizer is not that of the data or larger than the model's vocabulary.
    """
    if data.mock_data:
        return Datasets(
            train=MockDataset(vocab_size, seq_length, seed),
            valid=MockDataset(vocab_size, seq_length, seed + VALID_SEED),
            no_valid="",
            tokenizer_path=None,
            eod_id=None,
            fingerprint=f"mock:{vocab_size}:{seq_length}",
        )
    shares = parse_split(data.split)
    train = [_open(prefix, weight) for prefix, weight in _train_prefixes(data, vocab_size)]
    valid = [_open(prefix, weight) for prefix, weight in _prefixes(data.valid_data_path, "valid_data_path")]
    path, eod_id = _check_tokenizer(data, [*train, *valid], vocab_size)
    settings = _Settings(seq_length, seed, vocab_size)
    valid_set, why = _valid(train, valid, shares, settings)
    return Datasets(
        train=_blend(train, None if valid else shares, 0, settings),
        valid=valid_set,
        no_valid=why,
        tokenizer_path=path,
        eod_id=eod_id,
        fingerprint=_fingerprint(data, train, valid),
    )


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of training, validation and test data, summing to 1, of a string like ``99,1,0``.

    Raises:
        UsageError: It is not one to three numbers of which the first is positive.
    """
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SHARES) or min(shares) < 0 or not 0 < sum(shares) < float("inf") or shares[0] == 0:
        raise UsageError(f"split '{split}'", "give the shares of training, validation and test data, like 99,1,0")
    first, second, third = (*shares, 0.0, 0.0)[:3]
    total = first + second + third
    return first / total, second / total, third / total


def split_borders(count: int, shares: Sequence[float]) -> list[int]:
    """First of `count` sequences of each share, and the end; a share above 0 has at least one where there are enough.

    Otherwise rounded as in Megatron-LM (megatron/core/datasets/blended_megatron_dataset_builder.py).
    """
    ends = [round(count * sum(shares[: index + 1])) for index in range(len(shares))]
    sizes = [end - start for start, end in pairwise([0, *ends])]
    for index, share in enumerate(shares):
        largest = sizes.index(max(sizes))
        if share > 0 and sizes[index] == 0 and sizes[largest] > 1:
            sizes[index], sizes[largest] = 1, sizes[largest] - 1
    return [0, *accumulate(sizes)]


def resolve_prefix(given: str, key: str) -> Path:
    """The prefix of a pair of .bin and .idx that a user means, given with or without extension or ``_text_document``.

    Raises:
        UsageError: There is no such pair; the message names the nearest.
    """
    path = Path(given).expanduser()
    if path.suffix in (".bin", ".idx"):
        path = path.with_suffix("")
    for candidate in (path, path.with_name(path.name + "_text_document")):
        if idx_path(candidate).exists() or bin_path(candidate).exists():
            return candidate
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        raise UsageError(f"{key}: no folder {folder}", "give the prefix of a .bin and .idx made by `data prepare`")
    found = {file.stem: file for file in sorted(folder.glob("*.idx"))}
    hint = did_you_mean(path.name, found) if found else f"there is no .idx in {folder}; make one with `data prepare`"
    raise UsageError(f"{key}: no {path}.idx", hint)


@dataclass(frozen=True)
class _Settings:
    seq_length: int
    seed: int
    vocab_size: int


def _train_prefixes(data: DataConfig, vocab_size: int) -> list[tuple[Path, float | None]]:
    if data.dataset and data.train_data_path:
        raise UsageError("both dataset and train_data_path are set", "set one of them to null")
    if data.dataset:
        return [(named.ensure(data, vocab_size), None)]
    if not data.train_data_path:
        raise UsageError("no data to train on", "set dataset, train_data_path, or mock_data for random tokens")
    return _prefixes(data.train_data_path, "train_data_path")


def _prefixes(given: str | list[str | float] | None, key: str) -> list[tuple[Path, float | None]]:
    """Prefixes with their weights: one prefix, several, or Megatron's weight-prefix pairs, also in one string."""
    if not given:
        return []
    words = _words(given) if isinstance(given, str) else list(given)
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return [(resolve_prefix(str(word), key), None) for word in words]
    pairs = list(zip(numbers[::2], words[1::2], strict=False))
    if len(words) % 2 or any(weight is None or _number(word) is not None for weight, word in pairs):
        raise UsageError(f"{key}: a blend must be weight, prefix, weight, prefix, ...", f"found {words}")
    if any(weight <= 0 for weight, _ in pairs if weight is not None):
        raise UsageError(f"{key}: the weights of a blend must be positive", f"found {words}")
    return [(resolve_prefix(str(word), key), weight) for weight, word in pairs]


def _words(given: str) -> list[str | float]:
    whole = Path(given).expanduser()
    one = idx_path(whole).exists() or whole.exists() or len(given.split()) == 1
    return [given] if one else list(given.split())


def _number(word: str | float) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _open(prefix: Path, weight: float | None) -> TokenFile:
    return TokenFile(IndexedTokens(prefix), manifests.read(prefix), weight)


def _valid(
    train: list[TokenFile], valid: list[TokenFile], shares: Sequence[float], settings: _Settings
) -> tuple[Dataset | None, str]:
    """Validation samples, or why there are none; too few are no error before somebody asks for them."""
    settings = _Settings(settings.seq_length, settings.seed + VALID_SEED, settings.vocab_size)
    if valid:
        return _blend(valid, None, 0, settings), ""
    if shares[1] == 0:
        return None, "split leaves no documents for validation"
    try:
        return _blend(train, shares, 1, settings), ""
    except UsageError as error:
        return None, error.problem


def _blend(files: list[TokenFile], shares: Sequence[float] | None, share: int, settings: _Settings) -> Dataset:
    """Samples of one share of each file, or of the whole files where `shares` is None."""
    datasets = [_pack(file, shares, share, settings) for file in files]
    if len(datasets) == 1:
        return datasets[0]
    weights = [file.weight or dataset.samples_per_epoch for file, dataset in zip(files, datasets, strict=True)]
    return BlendedDataset(list(datasets), weights)


def _pack(file: TokenFile, shares: Sequence[float] | None, share: int, settings: _Settings) -> PackedDataset:
    borders = split_borders(len(file.tokens), shares) if shares else [0, len(file.tokens)]
    first, last = borders[share], borders[share + 1]
    if first == last:
        raise UsageError(
            f"{file.tokens.prefix}: no {SHARES[share]} documents in a split of {len(file.tokens)}",
            "use more documents or another split",
        )
    return PackedDataset(file.tokens, settings.seq_length, settings.seed, first, last, settings.vocab_size)


def _check_tokenizer(data: DataConfig, files: list[TokenFile], vocab_size: int) -> tuple[str | None, int | None]:
    """What to load the data's tokenizer from, and its end-of-document id.

    Raises:
        UsageError: The data has several tokenizers, another one than the experiment, or one larger than the model.
    """
    known = [(file.tokens.prefix, file.manifest.tokenizer) for file in files if file.manifest]
    asked = _asked_tokenizer(data, [facts.name for _, facts in known])
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
                "leave tokenizer_model out to use the data's own, or prepare the data with this one",
            )
        _check_size(facts.name, facts.vocab_size, vocab_size)
    if asked:
        _check_size(asked.name, asked.vocab_size, vocab_size)
    path = data.tokenizer_model
    eod_id = asked.eod_id if asked else None
    if known:
        prefix, facts = known[0]
        path, eod_id = str(prefix.parent / facts.file), facts.eod_id
    if data.eod_mask_loss and eod_id is None:
        raise UsageError("eod_mask_loss: the end-of-document token of the data is not known", "set tokenizer_model")
    return path, eod_id


def _asked_tokenizer(data: DataConfig, known_names: list[str]) -> Tokenizer | None:
    """The tokenizer that the experiment names, unless it is a hub name under which all of the data was prepared."""
    name = data.tokenizer_model
    if not name or (known_names and set(known_names) == {name} and not Path(name).expanduser().exists()):
        return None
    return tokenizers.load(name)


def _check_size(name: str, size: int, vocab_size: int) -> None:
    if size > vocab_size:
        raise UsageError(
            f"the tokenizer {name} has ids up to {size - 1}, but the model's vocab_size is {vocab_size}",
            f"set vocab_size to {size} or more, or prepare the data with the model's own tokenizer",
        )


def _fingerprint(data: DataConfig, train: list[TokenFile], valid: list[TokenFile]) -> str:
    parts = []
    for role, files in (("train", train), ("valid", valid)):
        for file in files:
            parts += [role, str(file.weight), manifests.fingerprint(file.tokens.prefix, file.manifest)]
    return manifests.combined(*parts, *([] if valid else [data.split]))
