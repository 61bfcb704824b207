"""Prepare named datasets in the data folder when they are first used."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from primus.config.schema import DataConfig
from primus.data.catalog.dataset_folders import name_dataset_folder
from primus.data.megatron import manifest as manifests
from primus.errors import UsageError


def ensure_dataset(data: DataConfig, vocab_size: int) -> Path:
    """Return the prefix of the token files of ``data.dataset``; prepare them if they do not exist.

    Several processes may call it at the same time: they share the work.

    Args:
        data: Names the dataset, its tokenizer and the data folder.
        vocab_size: Vocabulary size of the byte-level BPE, if one is trained on the dataset.

    Raises:
        UsageError: The dataset or its tokenizer does not exist.
        PrimusError: The preparation failed, or another process did not finish it in time.
    """
    assert data.dataset
    tokenizer = _choose_tokenizer(data, vocab_size)
    output = choose_output_prefix(Path(data.data_path), data.dataset, tokenizer)
    prefix = find_prefix(data, vocab_size)
    if manifests.read_manifest(prefix) is None:
        from primus.data.encode.job import EncodeJob, prepare_token_files
        from primus.data.prepare import steps

        job = EncodeJob(dataset=data.dataset, tokenizer=tokenizer, output=output, existing="keep")
        before = steps.EncodeSteps(data_path=Path(data.data_path))
        return prepare_token_files(steps.run_steps(before, job, _print_line, lambda progress: None), say=_print_line)[
            0
        ].prefix
    return prefix


def find_prefix(data: DataConfig, vocab_size: int) -> Path:
    """The prefix of the token files of ``data.dataset``, there or not.

    Raises:
        UsageError: Its tokenizer does not exist.
    """
    assert data.dataset
    output = choose_output_prefix(Path(data.data_path), data.dataset, _choose_tokenizer(data, vocab_size))
    return output.with_name(output.name + "_text_document")


def choose_output_prefix(data_path: Path, dataset: str, tokenizer: str) -> Path:
    """Output prefix of a named dataset in the data folder: ``data_path/DATASET/TOKENIZER/DATASET``."""
    name = name_dataset_folder(dataset)
    return Path(os.path.expanduser(data_path)) / name / _label_tokenizer(tokenizer) / name


def _choose_tokenizer(data: DataConfig, vocab_size: int) -> str:
    """Tokenizer name for the encode job."""
    if data.tokenizer_model:
        return data.tokenizer_model
    if data.tokenizer_type == "ByteLevelBPE":
        return f"bpe:{vocab_size}"
    raise UsageError(
        f"the dataset {data.dataset} needs a tokenizer",
        "set tokenizer_model to a tokenizer.json, its folder or a hub name, or tokenizer_type to ByteLevelBPE",
    )


def _label_tokenizer(tokenizer: str) -> str:
    """Folder name for a tokenizer: readable, and different for local tokenizers of different content."""
    from primus.data.tokenizers.load import load_tokenizer
    from primus.data.tokenizers.locate import is_local

    if not is_local(tokenizer):
        return re.sub(r"[^\w.-]+", "-", tokenizer)
    path = Path(os.path.expanduser(tokenizer.rpartition(":")[2].partition(",")[0]))
    loaded = load_tokenizer(tokenizer)
    name = path.parent.name if path.is_file() and path.stem == "tokenizer" else path.stem
    return f"{name}-{loaded.fingerprint[:8]}"


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
