"""The files beside the weights of an exported checkpoint: its tokenizer, ids of special tokens, a model card.

The tokenizer is with the checkpoint, in its run, or with the weights that the run began from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from primus.errors import PrimusError, UsageError
from primus.experiment import CONFIG_FILE, load_run_experiment
from primus.model_source.model_card import CheckpointOrigin, format_model_card
from primus.runs.store import Run
from primus.runs.working_folder import anchor_paths, find_working_folder

if TYPE_CHECKING:
    from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint
    from primus.config.schema import ModelSpec, Trainer
    from primus.data.hub_files import HubFiles, TokenizerFiles

NAME_ONE = "name one by --tokenizer FILE|FOLDER"
CARD = "README.md"


class ExportedFiles(NamedTuple):
    """Files beside the weights of an exported checkpoint."""

    files: HubFiles
    tokenizer: str | None
    """Where the tokenizer among them is from; None if there is none."""
    problem: str = ""
    """Why there is no tokenizer, in words."""


def collect_hub_files(opened: OpenedCheckpoint, to: str, given: str | None) -> ExportedFiles:
    """The files beside the weights of a target.

    Args:
        opened: The checkpoint.
        to: Format of the target: that of Hugging Face gets a model card where the source has none.
        given: The tokenizer of `--tokenizer`.

    Raises:
        UsageError: The given tokenizer does not exist, is damaged, or has more ids than the model.
    """
    from primus.data.hub_files import MODEL_DOCUMENTS

    origin = find_origin(opened.found)
    exported = _find_tokenizer(origin, opened.spec, given)
    files = dict(exported.files)
    if origin.run is None and origin.base is None:  # the weights as they were published
        for place in reversed(_list_places(opened.found)):
            files |= {name: (place / name).read_bytes() for name in MODEL_DOCUMENTS if (place / name).is_file()}
    if to == "huggingface" and CARD not in files:
        files[CARD] = format_model_card(opened, origin, files).encode()
    return exported._replace(files=files)


def find_origin(found: FoundCheckpoint) -> CheckpointOrigin:
    """The run of a checkpoint, and the weights that it began from."""
    from primus.checkpoint.formats.open import PARENTS

    for parent in list(found.folder.resolve().parents)[:PARENTS]:
        if (parent / CONFIG_FILE).is_file():
            run = Run(parent)
            try:
                asked = load_run_experiment(run).experiment
                trainer = anchor_paths(asked.trainer, find_working_folder(run, asked.workspace))
            except PrimusError:  # of another version, or with secrets that this shell does not have
                return CheckpointOrigin(found, run, None, _find_base(found, None))
            return CheckpointOrigin(found, run, trainer, _find_base(found, trainer.checkpoint.load))
    return CheckpointOrigin(found, None, None, _find_base(found, None))


def _find_base(found: FoundCheckpoint, load: str | None) -> FoundCheckpoint | None:
    from primus.checkpoint.formats.adapter import find_base
    from primus.checkpoint.formats.open import find_checkpoint, must_download

    try:
        if load is None and found.format == "peft":
            load = find_base(found.folder)
        return find_checkpoint(load) if load and not must_download(load) else None
    except PrimusError:  # it was moved or removed since
        return None


def _find_tokenizer(origin: CheckpointOrigin, spec: ModelSpec, given: str | None) -> ExportedFiles:
    from primus.data.hub_files import TokenizerFiles

    names, problems = ([given] if given else []), list[str]()
    chosen: TokenizerFiles | None = None
    others: dict[str, bytes] = {}
    for name in names or _list_names(origin, problems):
        try:
            files = TokenizerFiles(name)
            _check_size(files, spec)
        except PrimusError as error:
            if given:
                raise UsageError(f"--tokenizer {given}: {error.problem}", error.hint) from None
            problems.append(error.problem)
            continue
        chosen = chosen or files
        # Token files have a tokenizer.json alone; what belongs to it is with the weights that the run began from.
        if files.tokenizer.fingerprint == chosen.tokenizer.fingerprint:
            others = {**files.others, **others}
    if chosen is None:
        return ExportedFiles({}, None, problems[0] if problems else "the checkpoint and its run name none")
    is_tuned = origin.trainer is not None and origin.trainer.data.sft_data_path is not None
    try:
        files_by_name = chosen.build_files(others, spec.max_position_embeddings, ends_turns=is_tuned)
    except PrimusError as error:
        return ExportedFiles({}, None, error.problem)
    return ExportedFiles(files_by_name, chosen.tokenizer.name)


def _check_size(files: TokenizerFiles, spec: ModelSpec) -> None:
    largest = files.tokenizer.vocab_size - 1
    if largest >= spec.vocab_size:
        raise UsageError(
            f"the tokenizer {files.tokenizer.name} has ids up to {largest}, and the model {spec.vocab_size} embeddings",
            "give the tokenizer of this model",
        )


def _list_names(origin: CheckpointOrigin, problems: list[str]) -> Iterator[str]:
    """Tokenizers of a checkpoint as `load_tokenizer` takes them, the one that it was trained with first."""
    from primus.data.hub_files import has_tokenizer

    yield from (str(place) for place in _list_places(origin.found) if has_tokenizer(place))
    if origin.trainer is not None:
        yield from _list_trained_names(origin.trainer, problems)
    if origin.base is not None and origin.base.folder != origin.found.folder:
        yield from _list_names(find_origin(origin.base), problems)


def _list_places(found: FoundCheckpoint) -> list[Path]:
    """The folder of a checkpoint, and those in which a conversion keeps the files of its source."""
    from primus.checkpoint.formats.open import PARENTS, TOKENIZER_FOLDER

    folder = found.folder if found.folder.is_dir() else found.folder.parent
    return [folder, *(each / TOKENIZER_FOLDER for each in (folder, *list(folder.resolve().parents)[:PARENTS]))]


def _list_trained_names(trainer: Trainer, problems: list[str]) -> Iterator[str]:
    """The tokenizer that an experiment names, and that of its token files."""
    from primus.config.token_files import parse_weighted_prefixes
    from primus.data.megatron import manifest
    from primus.data.prepare.named_dataset import find_prefix

    data = trainer.data
    if data.tokenizer_model:
        yield data.tokenizer_model
    try:
        prefixes = [prefix for prefix, _ in parse_weighted_prefixes(data.train_data_path, "train_data_path")]
        prefixes += [find_prefix(data, trainer.model.vocab_size)] if data.dataset else []
        for prefix in prefixes[:1]:
            written = manifest.read_manifest(prefix)
            if written is not None:
                yield str(prefix.parent / written.tokenizer.file)
            else:
                problems.append(f"the run names the data {prefix}, and no tokenizer is next to it")
    except UsageError as error:  # the data were moved or removed since
        problems.append(error.problem)
