"""Token files from text, made by any number of processes; what goes wrong leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from primus import registry
from primus.data import atomic, documents
from primus.data import manifest as manifests
from primus.data import tokenizer as tokenizers
from primus.data.encoding import publish, sentences, trained
from primus.data.encoding.encode import EncodeStage
from primus.data.indexed import bin_path, idx_path
from primus.data.manifest import Manifest, Recipe
from primus.data.pipeline import executors, inputs, work
from primus.data.pipeline.executors import Executor
from primus.data.pipeline.inputs import Inputs
from primus.data.pipeline.work import Board, Row
from primus.data.pipeline.work_folder import WorkFolder
from primus.data.pipeline.workers import Show
from primus.data.tokenizer import Tokenizer
from primus.errors import PrimusError, UsageError

PARALLEL_BYTES = 32_000_000
"""Size of the input from which starting more processes pays."""

LOCK_TIMEOUT_S = 3600.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to prepare: `inputs` or a `dataset`, with a tokenizer, to an output prefix."""

    output: Path
    """Prefix; the files are ``OUTPUT_KEY_document.{bin,idx}`` as Megatron-LM's preprocess_data.py names them."""
    tokenizer: str
    """A tokenizer.json, its folder, a hub name, or ``bpe:VOCAB`` to train a byte-level BPE on the text."""
    inputs: tuple[str, ...] = ()
    """Files and folders."""
    dataset: str | None = None
    """Named dataset."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of a record; each becomes a pair of files."""
    eod: str | None = None
    """Token that ends a document; found in the vocabulary when None."""
    follow_declared: bool = False
    """Whether the files beside the tokenizer decide that first, as in Megatron-LM."""
    recipe: Recipe = field(default_factory=Recipe)
    """Settings that decide the tokens."""
    workers: int | None = None
    """Processes that tokenize; chosen from the size of the input when None."""
    executor: Executor = "local"
    """Who does the shards."""
    fast: bool = True
    """Tokenize the fast way where the tokenizer has one; the tokens are the same."""
    existing: Literal["check", "keep", "replace"] = "check"
    """Files that are there already must be the same, are kept whatever they were made from, or are replaced where they
    are not the same or are damaged."""


@dataclass(frozen=True)
class Prepared:
    """One pair of token files."""

    prefix: Path
    """Path without extension."""
    manifest: Manifest
    """What it holds."""
    made: bool
    """Whether it was made now; false if it was there."""


def prepare(job: Job, say: Say = lambda text: None, show: Show = lambda progress: None) -> list[Prepared]:
    """Make the token files of a job, one pair for each JSON key; the same job again finds them made.

    Any number of processes may do the same job at once, on any machines that share the output's folder; a job that was
    stopped goes on where it was. Files appear complete or not at all, the manifest last.

    Args:
        job: What to prepare.
        say: Receives lines for people.
        show: Receives the progress.

    Raises:
        UsageError: An input is missing, empty or unknown, the tokenizer too, or other data is at the output.
        PrimusError: A document is bad, a file damaged, or the output cannot be written.
    """
    _check(job)
    tokenizer = None if trained.is_trained(job.tokenizer) else load_tokenizer(job, in_parallel=True)
    if tokenizer and job.recipe.append_eod and (note := _note_end(job, tokenizer)):
        say(note)
    text = inputs.open_input(job.inputs, job.dataset, job.output, job.recipe.text_documents, is_folder=False)
    try:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        return _Preparation(job, text, say, show, WorkFolder.beside(job.output), tokenizer).run()
    except OSError as error:
        raise atomic.cannot_write(job.output, error) from None


def output_prefix(job: Job, key: str) -> Path:
    """Prefix of the token files of one JSON key."""
    level = "sentence" if job.recipe.split_sentences else "document"
    return job.output.with_name(f"{job.output.name}_{key}_{level}")


def _check(job: Job) -> None:
    """Find mistakes that need no reading."""
    if bool(job.inputs) == bool(job.dataset):
        raise UsageError("both an input and a dataset" if job.inputs else "nothing to prepare", "give one of them")
    if job.dataset:
        registry.path("sources", job.dataset)
    if job.output.name in ("", "."):
        raise UsageError(f"output '{job.output}' has no file name", "give a prefix like data/corpus")
    if not job.json_keys or len(set(job.json_keys)) != len(job.json_keys):
        raise UsageError(f"JSON keys {list(job.json_keys)}", "give each key once")
    if job.recipe.text_documents not in documents.TEXT_DOCUMENTS:
        raise UsageError(
            f"text documents '{job.recipe.text_documents}'", f"valid: {', '.join(documents.TEXT_DOCUMENTS)}"
        )
    if job.recipe.split_sentences:
        sentences.load(job.recipe.split_sentences, job.recipe.keep_newlines)
    if trained.is_trained(job.tokenizer):
        trained.check(job.tokenizer, job.eod)


def load_tokenizer(job: Job, in_parallel: bool = False) -> Tokenizer:
    """The tokenizer of a job that trains none.

    Raises:
        UsageError: There is no such tokenizer, or no token that ends its documents.
    """
    parse = job.recipe.parse_special_tokens
    tokenizer = tokenizers.load(job.tokenizer, job.eod, parse, job.fast, in_parallel, job.follow_declared)
    if not job.recipe.append_eod:
        return tokenizer
    if tokenizer.eod is None:
        raise UsageError(
            f"{tokenizer.name}: no token that ends a document", "name it with --eod, or use --no-append-eod"
        )
    end = tokenizer.declared_end
    if job.follow_declared and job.eod is None and end and tokenizer.declared_eod is None:
        raise UsageError(
            f"{end.source}: it says that {end} ends a text, but the vocabulary has no such token",
            "name the end of a document with --eod, or correct the file",
        )
    return tokenizer


def _note_end(job: Job, tokenizer: Tokenizer) -> str:
    """What is to be said of the end of documents, which nobody has named; empty where there is no doubt."""
    end, declared = tokenizer.declared_end, tokenizer.declared_eod
    if job.eod is not None:
        return ""
    if job.follow_declared:
        is_file = tokenizer.file_suffix == ".json" and not job.tokenizer.startswith("tiktoken:")
        source = end.source if end and declared else "the usual token of its vocabulary"
        return f"documents end with {tokenizer.eod} ({source})" if is_file else ""
    if declared in (None, tokenizer.eod):
        return ""
    assert end
    return f"documents end with {tokenizer.eod}, but {end.source} names {declared}: choose with --eod"


@dataclass
class _Preparation:
    """A job under way."""

    job: Job
    text: Inputs
    say: Say
    show: Show
    folder: WorkFolder
    tokenizer: Tokenizer | None
    _told: set[str] = field(default_factory=set)
    """Keys of which it was said that they are made anew."""

    def run(self) -> list[Prepared]:
        complete = False
        try:
            prepared = self._prepare_all()
            complete = True
        finally:
            self.folder.sweep(complete)
        return prepared

    def _prepare_all(self) -> list[Prepared]:
        found = {key: self._found(key) for key in self.job.json_keys}
        intact = ", and is as it was written" if self.job.existing == "replace" else ""
        for each in found.values():
            if each:
                self.say(f"{each.prefix}: nothing to do, it was made from the same input before{intact}")
        return [each or self._make(key) for key, each in found.items()]

    def _make(self, key: str) -> Prepared:
        recipe = self._recipe(key)
        stage = EncodeStage(self._tokenizer(), recipe, self.text.stamps)
        if found := self._found(key):  # by somebody who was done while this process waited
            return found
        board = work.open_board(stage, self.text.shards, self.folder.path, recipe.max_bad, self.job.output)
        try:
            with self.folder.using(board):
                rows = self._rows(key, board)
                with self._lock("prepare"):
                    return self._found(key) or self._publish(key, board, rows)
        except FileNotFoundError:  # somebody was done and removed the folder just when it was opened
            if found := self._found(key):
                return found
            raise

    def _rows(self, key: str, board: Board) -> list[Row]:
        """The rows of all shards; an interrupt tells what is kept."""
        try:
            return executors.run(board, self.job.executor, self._num_workers(board), f"encoding {key}", self.show)
        except KeyboardInterrupt:
            if done := len(board.rows()):
                self.say(f"{done} of {len(board.shards)} shards are done: the same command goes on with the others")
            raise

    def _publish(self, key: str, board: Board, rows: list[Row]) -> Prepared:
        if not board.folder.is_dir():
            raise PrimusError(f"{board.folder}: removed by somebody, with what was done", "run the same command again")
        if not any(row.counts.get("tokens") for row in rows):
            atomic.remove_folder(board.folder)
            bad = next((item for row in rows for item in row.bad), None)
            raise UsageError(
                f"no text in {self.text}",
                f"every document is empty or bad, as {bad.where}: {bad.reason}" if bad else "every document is empty",
            )
        prefix, stage = self._prefix(key), board.stage
        assert isinstance(stage, EncodeStage)
        manifest = publish.publish(
            board, rows, prefix, self.text, self.job.tokenizer, begin=lambda: self.folder.begins_to_publish(key)
        )
        self.folder.has_published(key, board)
        publish.tell(prefix, manifest, rows, self.say)
        return Prepared(prefix, manifest, made=True)

    def _found(self, key: str) -> Prepared | None:
        manifest = self._existing(key)
        return Prepared(self._prefix(key), manifest, made=False) if manifest else None

    def _existing(self, key: str) -> Manifest | None:
        """The manifest at the output if the same job has made it, or if whatever is there is to be kept.

        Raises:
            UsageError: There is something else, and the job does not replace it.
        """
        prefix, replaces = self._prefix(key), self.job.existing == "replace"
        if self.folder.was_publishing(key):
            return None
        try:
            manifest = manifests.read(prefix)
        except UsageError as error:
            if not replaces:
                raise
            self._tell_replaced(key, error.problem)
            return None
        if manifest and self.job.existing == "keep":
            return manifest
        if manifest:
            difference = self._difference(key, manifest)
        else:
            difference = "it has no manifest" if idx_path(prefix).exists() or bin_path(prefix).exists() else ""
        if not replaces and difference:
            raise UsageError(
                f"{prefix}.bin is there already and was made otherwise: {difference}",
                "give another --output, or replace it with --overwrite",
            )
        if replaces and manifest:
            difference = difference or publish.damage(prefix, manifest)
        if difference:
            self._tell_replaced(key, difference)
        return None if difference else manifest

    def _tell_replaced(self, key: str, reason: str) -> None:
        """Say once why what is there is made anew."""
        if key not in self._told:
            self._told.add(key)
            self.say(f"{self._prefix(key)}: made anew: {reason}")

    def _difference(self, key: str, manifest: Manifest) -> str:
        """Why what is there did not come from this job; empty if it did."""
        before, tokenizer = manifest.tokenizer, self.tokenizer
        asked = (tokenizer.fingerprint, tokenizer.eod) if tokenizer else (self.job.tokenizer, tokenizers.END_OF_TEXT)
        if asked != (before.fingerprint if tokenizer else before.name, before.eod):
            return f"its tokenizer is {before.name} with {before.eod}"
        recipe = self._recipe(key)
        for name in Recipe.__struct_fields__:
            if name != "max_bad" and getattr(recipe, name) != getattr(manifest.recipe, name):
                return f"its {name} is {getattr(manifest.recipe, name)}"
        if manifest.bad_documents > recipe.max_bad:
            return f"{manifest.bad_documents} bad documents were left out"
        return self.text.difference(manifest.inputs)

    def _tokenizer(self) -> Tokenizer:
        """The job's tokenizer, trained by the first process that needs it."""
        if not self.tokenizer:
            job, path = self.job, self.folder.path
            path.mkdir(exist_ok=True)
            with self._lock("train a tokenizer for"):
                self.say(f"training a byte-level BPE on {self.text}: {job.tokenizer}")
                self.tokenizer = trained.tokenizer_for(
                    job.tokenizer, self.text, job.json_keys, job.recipe, path, job.fast
                )
        return self.tokenizer

    def _lock(self, purpose: str) -> AbstractContextManager[None]:
        waiting = f"to {purpose} {self.job.output}"
        return atomic.lock(self.folder.lock, LOCK_TIMEOUT_S, lambda holder: self.say(f"waiting for {holder} {waiting}"))

    def _num_workers(self, board: Board) -> int | None:
        """Processes to start beside this one, None for all cores; what is a single shard is done here."""
        if self.job.executor == "local" and len(board.shards) == 1:
            return 0
        if self.job.workers or self.job.executor != "local":
            return self.job.workers
        return None if self.text.num_bytes >= PARALLEL_BYTES else 1

    def _prefix(self, key: str) -> Path:
        return output_prefix(self.job, key)

    def _recipe(self, key: str) -> Recipe:
        return msgspec.structs.replace(self.job.recipe, json_key=key)
