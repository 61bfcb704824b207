"""The samples of an experiment in the order of Megatron's own GPTDataset (`dataloader: engine`).

The files, their weights, the split and the seed are those of the experiment; megatron-core decides which tokens are in
which sample. Micro batches are cut as by Megatron-LM's `--dataloader-type single`, and as by primus.
"""

from __future__ import annotations

import logging
import subprocess
import sysconfig
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets import utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from numpy.typing import NDArray

from primus.config.schema import DataConfig, Trainer
from primus.config.token_files import SHARES, parse_split, parse_weighted_prefixes
from primus.data.megatron.indexed_dataset import IndexedTokens
from primus.data.prepare import named_dataset
from primus.data.training.dataset import Datasets
from primus.data.training.packing import Dataset, Piece, TokenFileProgress
from primus.errors import UnfitError, UsageError

ORDER = "gpt_dataset"
"""Version of the order in the fingerprint of the data."""
CACHE = "megatron/cache"
"""Folder of GPTDataset's indices, in the run folder."""
NO_TOKEN = -1
"""Id that no token has, for a padding token that megatron-core would mask."""

Blend = tuple[list[str], list[float] | None]
"""Prefixes of token files, and their weights where the experiment gives weights."""


class TokenIds:
    """What GPTDataset asks of a tokenizer."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod, self.pad = vocab_size, eod, NO_TOKEN
        self.unique_identifiers = OrderedDict(vocab_size=vocab_size, eod=eod)


class EngineOrderedDataset:
    """A GPTDataset, or a blend of several, as the samples that the loader of primus reads.

    Args:
        samples: Of megatron-core.
        same_data: The same tokens in the order of primus, which knows files and epochs.
    """

    def __init__(self, samples: Any, same_data: Dataset) -> None:
        self._samples, self._same_data = samples, same_data
        self.samples_per_epoch = same_data.samples_per_epoch

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        # megatron-core has as many samples as the run takes, of several epochs if it takes more than one.
        sample = self._samples[index % len(self._samples)]
        tokens: NDArray[np.int64] = sample["tokens"].numpy()
        return np.append(tokens, sample["labels"].numpy()[-1:])

    def find_pieces(self, index: int) -> list[Piece]:
        """None: megatron-core does not say where the tokens of a sample come from."""
        return []

    def compute_progress(self, num_samples: int) -> list[TokenFileProgress]:
        """Progress in each token file after the first `num_samples`, which is a property of the blend."""
        return self._same_data.compute_progress(num_samples)


def order_by_engine(trainer: Trainer, folder: Path, data: Datasets, global_batch_size: int) -> Datasets:
    """The samples of `data` in Megatron's order. All processes of the run call it.

    Args:
        trainer: Of the experiment.
        folder: Of the run; the indices of GPTDataset are written below it.
        data: The samples as primus has opened and checked them.
        global_batch_size: Sequences in one optimizer step.

    Raises:
        UsageError: The split gives a share of a file no documents.
        UnfitError: The helpers of a checkout cannot be compiled.
    """
    compile_helpers()
    training = trainer.training
    evaluated = max(1, training.eval_iters) * global_batch_size
    sizes = [training.train_iters * global_batch_size, evaluated, evaluated]
    config = _build_config(trainer, data.eod_id, folder / CACHE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the padding token is none
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    train, valid, test = (
        None if mine is None or samples is None else EngineOrderedDataset(samples, mine)
        for samples, mine in zip(built, (data.train, data.valid, data.test), strict=True)
    )
    assert train is not None, "open_datasets has found training samples"
    fingerprint = f"{data.fingerprint.partition('-')[0]}-{ORDER}"
    return replace(data, train=train, valid=valid, test=test, fingerprint=fingerprint)


def _build_config(trainer: Trainer, eod_id: int | None, cache: Path) -> GPTDatasetConfig:
    data, training = trainer.data, trainer.training
    train = _find_train_files(data, trainer.model.vocab_size)
    valid, test = (
        _group_weights(parse_weighted_prefixes(given, key)) if given else None
        for key, given in (("valid_data_path", data.valid_data_path), ("test_data_path", data.test_data_path))
    )
    is_split = valid is None and test is None
    if is_split:
        _check_split(data.split, train[0])
    return GPTDatasetConfig(
        **({"blend": train, "split": data.split} if is_split else {"blend_per_split": [train, valid, test]}),
        random_seed=training.seed,
        sequence_length=training.seq_length,
        path_to_cache=str(cache.absolute()),
        tokenizer=TokenIds(trainer.model.vocab_size, NO_TOKEN if eod_id is None else eod_id),
        # Masks and positions are made from the tokens, as for the order of primus.
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def _find_train_files(data: DataConfig, vocab_size: int) -> Blend:
    if data.dataset:
        return [str(named_dataset.ensure_dataset(data, vocab_size))], None
    return _group_weights(parse_weighted_prefixes(data.train_data_path, "train_data_path"))


def _group_weights(prefixes: Sequence[tuple[Path, float | None]]) -> Blend:
    weights = [weight for _, weight in prefixes if weight is not None]
    return [str(prefix) for prefix, _ in prefixes], weights if len(prefixes) > 1 and weights else None


def _check_split(split: str, prefixes: Sequence[str]) -> None:
    """GPTDataset searches without end for samples in a share without documents.

    Raises:
        UsageError: A share above 0 of a file is rounded to nothing.
    """
    shares = parse_split(split)
    for prefix in prefixes:
        count = len(IndexedTokens(Path(prefix)))
        for index, share in enumerate(shares):
            start, end = (round(sum(shares[:last]) * count) for last in (index, index + 1))
            if share > 0 and start == end:
                raise UsageError(
                    f"split: {split}: Megatron gives {SHARES[index]} none of the {count} documents of {prefix}",
                    "set another split or valid_data_path, or dataloader: primus",
                )


def compile_helpers() -> None:
    """Compile the index builders of a checkout, as Megatron-LM does when it starts; a wheel has them.

    Raises:
        UnfitError: They cannot be compiled.
    """
    problem = [""]
    if (not dist.is_initialized() or dist.get_rank() == 0) and not find_spec("megatron.core.datasets.helpers_cpp"):
        problem = [_make_helpers(Path(utils.__file__).parent)]
    if dist.is_initialized():
        dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise UnfitError(f"dataloader: engine: {problem[0]}", "install make, g++ and pybind11, or use an image")


def _make_helpers(folder: Path) -> str:
    """Run the checkout's Makefile for this interpreter; returns the problem, if there is one."""
    try:
        import pybind11
    except ImportError:
        return f"the helpers in {folder} are not compiled, and pybind11 is not installed"
    # The Makefile asks the first python3 in PATH, which need not be this one.
    words = [
        f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
        f"CPPFLAGS=-I{sysconfig.get_path('include')} -I{pybind11.get_include()}",
    ]
    try:
        done = subprocess.run(["make", "-C", str(folder), *words], capture_output=True, text=True)
    except OSError as error:
        return f"the helpers in {folder} are not compiled, and make cannot be run: {error.strerror}"
    if done.returncode:
        logging.getLogger(__name__).error("make -C %s failed:\n%s%s", folder, done.stdout, done.stderr)
        return f"make -C {folder} fails: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return ""
