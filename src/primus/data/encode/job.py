"""Encode text into token files, in any number of processes. A failed run leaves existing files unchanged.

Each process that runs a job takes these steps for each JSON key; several processes may be in the same step unless it
holds the lock of the output:
    find      an intact output of the same job ends the work
    train     with the lock: train a tokenizer, if the job asks for one and no process has trained it
    encode    process open shards until all are done
    publish   with the lock: if no other process has published, merge the shards and rename the files
Finished shards stay in the work folder when a process fails, and the next run resumes from them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from primus import registry
from primus.data import atomic, readers
from primus.data.encode import publish, sentences, trained
from primus.data.encode.encode import EncodeStage
from primus.data.megatron import manifest as manifests
from primus.data.megatron.indexed_dataset import bin_path, idx_path
from primus.data.megatron.manifest import EncodeRecipe, TokenFileManifest
from primus.data.shards import executors, inputs, shard_queue
from primus.data.shards.executors import Executor
from primus.data.shards.inputs import Inputs
from primus.data.shards.shard_queue import ShardQueue, ShardResult
from primus.data.shards.work_folder import WorkFolder
from primus.data.shards.workers import Show
from primus.data.tokenizers.document_ends import END_OF_TEXT
from primus.data.tokenizers.load import load_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import PrimusError, UsageError
from primus.messages import Say

PARALLEL_BYTES = 32_000_000
"""Input size above which several processes are faster than one, in spite of their start."""

LOCK_TIMEOUT_S = 3600.0
"""Longest wait for the process that trains the tokenizer or merges the shards, which may be hundreds of gigabytes."""


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """Settings of an encode job: `inputs` or a `dataset`, a tokenizer and an output prefix."""

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
    """Whether the files next to the tokenizer take precedence for `eod`, as in Megatron-LM."""
    recipe: EncodeRecipe = field(default_factory=EncodeRecipe)
    """Settings that determine the tokens."""
    workers: int | None = None
    """Number of processes; chosen from the size of the input when None."""
    executor: Executor = "local"
    """Where the shards run."""
    fast: bool = True
    """Use the fast path if it supports the tokenizer; the tokens are the same."""
    existing: Literal["check", "keep", "replace"] = "check"
    """Existing files must come from the same job (`check`), are kept in any case (`keep`), or are replaced if they
    differ or are damaged (`replace`)."""


@dataclass(frozen=True)
class PreparedTokens:
    """One pair of token files."""

    prefix: Path
    """Path without extension."""
    manifest: TokenFileManifest
    """Manifest of the files."""
    made: bool
    """Whether this run created the files; False if it reused existing ones."""


def prepare_token_files(
    job: EncodeJob, say: Say = lambda text: None, show: Show = lambda progress: None
) -> list[PreparedTokens]:
    """Write the token files of a job, a pair for each JSON key; existing files of the same job are reused.

    Any number of processes may run the same job at the same time, on any machines that share the output's folder. An
    interrupted job resumes. Files appear complete or not at all, the manifest last.

    Args:
        job: Settings of the job.
        say: Receives human-readable lines.
        show: Receives the progress.

    Raises:
        UsageError: An input or the tokenizer is missing, empty or unknown, or the output holds other data.
        PrimusError: A document is bad, a file is damaged, or the output cannot be written.
    """
    _check_job(job)
    tokenizer = None if trained.is_trained(job.tokenizer) else load_job_tokenizer(job)
    if tokenizer and job.recipe.append_eod and (note := _note_end(job, tokenizer)):
        say(note)
    text = inputs.open_input(job.inputs, job.dataset, job.output, job.recipe.text_documents, is_folder=False)
    try:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        return _Preparation(job, text, say, show, WorkFolder.for_output(job.output), tokenizer).run()
    except OSError as error:
        raise atomic.build_write_error(job.output, error) from None


def output_prefix(job: EncodeJob, key: str) -> Path:
    """Prefix of the token files of one JSON key."""
    level = "sentence" if job.recipe.split_sentences else "document"
    return job.output.with_name(f"{job.output.name}_{key}_{level}")


def _check_job(job: EncodeJob) -> None:
    """Check the settings that can be checked without reading the input."""
    if bool(job.inputs) == bool(job.dataset):
        raise UsageError("both an input and a dataset" if job.inputs else "nothing to prepare", "give one of them")
    if job.dataset:
        registry.find_plug_in_file("sources", job.dataset)
    if job.output.name in ("", "."):
        raise UsageError(f"output '{job.output}' has no file name", "give a prefix like data/corpus")
    if not job.json_keys or len(set(job.json_keys)) != len(job.json_keys):
        raise UsageError(f"JSON keys {list(job.json_keys)}", "give each key once")
    if job.recipe.text_documents not in readers.TEXT_DOCUMENTS:
        raise UsageError(f"text documents '{job.recipe.text_documents}'", f"valid: {', '.join(readers.TEXT_DOCUMENTS)}")
    if job.recipe.split_sentences:
        sentences.load_splitter(job.recipe.split_sentences, job.recipe.keep_newlines)
    if trained.is_trained(job.tokenizer):
        trained.check(job.tokenizer, job.eod)


def load_job_tokenizer(job: EncodeJob) -> Tokenizer:
    """Load the tokenizer of a job that does not train one.

    Raises:
        UsageError: The tokenizer does not exist, or it has no end-of-document token.
    """
    parse = job.recipe.parse_special_tokens
    tokenizer = load_tokenizer(job.tokenizer, job.eod, parse, job.fast, job.follow_declared)
    if not job.recipe.append_eod:
        return tokenizer
    if tokenizer.eod is None:
        raise UsageError(f"{tokenizer.name}: no end-of-document token", "give one with --eod, or use --no-append-eod")
    end = tokenizer.declared_end
    if job.follow_declared and job.eod is None and end and tokenizer.declared_eod is None:
        raise UsageError(
            f"{end.source}: declares {end} as the end of a text, but the vocabulary does not have it",
            "give the end-of-document token with --eod, or correct the file",
        )
    return tokenizer


def _note_end(job: EncodeJob, tokenizer: Tokenizer) -> str:
    """Message about the end-of-document token if the user has not chosen it; empty if it is unambiguous."""
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
    """State of a job in this process."""

    job: EncodeJob
    text: Inputs
    say: Say
    show: Show
    folder: WorkFolder
    tokenizer: Tokenizer | None
    _reported: set[str] = field(default_factory=set)
    """Keys whose replacement has been reported."""

    def run(self) -> list[PreparedTokens]:
        complete = False
        try:
            prepared = self._prepare_all()
            complete = True
        finally:
            # Also after an error: queues that hold no finished shard are deleted, the others stay for the next run.
            self.folder.delete_unused(complete)
        return prepared

    def _prepare_all(self) -> list[PreparedTokens]:
        # Check all keys before the first one is encoded: other data at an output must not be found after hours of work.
        found = {key: self._find_prepared(key) for key in self.job.json_keys}
        intact = ", and its checksums match" if self.job.existing == "replace" else ""
        for each in found.values():
            if each:
                self.say(f"{each.prefix}: nothing to do, already made from the same input{intact}")
        return [each or self._make_token_files(key) for key, each in found.items()]

    def _make_token_files(self, key: str) -> PreparedTokens:
        recipe = self._build_recipe(key)
        tokenizer = self._load_or_train_tokenizer(key)
        if found := self._find_prepared(key):  # another process has published while this one waited for the lock
            return found
        assert tokenizer is not None
        stage = EncodeStage(tokenizer, recipe, self.text.fingerprints)
        queue = shard_queue.open_shard_queue(stage, self.text.shards, self.folder.path, recipe.max_bad, self.job.output)
        # In use until the files are published: `delete_unused` of another process must not remove finished shards.
        try:
            with self.folder.mark_in_use(queue):
                results = self._encode_shards(key, queue)
                # Every process arrives here when all shards are done. The first one with the lock publishes; the others
                # find its output afterwards.
                with self._hold_lock("prepare"):
                    return self._find_prepared(key) or self._publish_token_files(key, queue, results)
        except FileNotFoundError:  # another process has published and removed the folder meanwhile
            if found := self._find_prepared(key):
                return found
            raise

    def _encode_shards(self, key: str, queue: ShardQueue) -> list[ShardResult]:
        """Results of all shards; an interrupt reports the number of finished shards."""
        try:
            return executors.run(
                queue, self.job.executor, self._choose_num_workers(queue), f"encoding {key}", self.show
            )
        except KeyboardInterrupt:
            if done := len(queue.list_results()):
                self.say(f"{done} of {len(queue.shards)} shards are finished: run the same command again to resume")
            raise

    def _publish_token_files(self, key: str, queue: ShardQueue, results: list[ShardResult]) -> PreparedTokens:
        # The caller has checked with the lock held that no process has published, so no process has deleted the folder.
        if not queue.folder.is_dir():
            raise PrimusError(
                f"{queue.folder}: deleted by another program, with the finished shards", "run the same command again"
            )
        if not any(result.counts.get("tokens") for result in results):
            atomic.remove_folder(queue.folder)  # the next run would only find the same empty shards
            bad = next((item for result in results for item in result.bad), None)
            raise UsageError(
                f"no text in {self.text}",
                f"every document is empty or bad, for example {bad.where}: {bad.reason}"
                if bad
                else "every document is empty",
            )
        prefix, stage = self._build_prefix(key), queue.stage
        assert isinstance(stage, EncodeStage)
        manifest = publish.publish_token_files(
            queue, results, prefix, self.text, self.job.tokenizer, begin=lambda: self.folder.mark_publishing(key)
        )
        self.folder.finish_publishing(key, queue)
        publish.report_prepared(prefix, manifest, results, self.say)
        return PreparedTokens(prefix, manifest, made=True)

    def _find_prepared(self, key: str) -> PreparedTokens | None:
        manifest = self._find_existing(key)
        return PreparedTokens(self._build_prefix(key), manifest, made=False) if manifest else None

    def _find_existing(self, key: str) -> TokenFileManifest | None:
        """Manifest of the existing output if the same job has created it, or if the job keeps any existing output.

        Raises:
            UsageError: The output holds other data, and the job does not replace it.
        """
        prefix, replaces = self._build_prefix(key), self.job.existing == "replace"
        # An interrupted publisher leaves files of two runs; they count as missing, whatever `existing` says.
        if self.folder.was_publishing(key):
            return None
        try:
            manifest = manifests.read_manifest(prefix)
        except UsageError as error:
            if not replaces:
                raise
            self._report_replaced(key, error.problem)
            return None
        if manifest and self.job.existing == "keep":
            return manifest
        if manifest:
            difference = self._find_difference(key, manifest)
        else:
            difference = "it has no manifest" if idx_path(prefix).exists() or bin_path(prefix).exists() else ""
        if not replaces and difference:
            raise UsageError(
                f"{prefix}.bin exists and differs: {difference}",
                "give another --output, or replace it with --overwrite",
            )
        # Only `replace` reads the output files to verify their checksums; otherwise comparing the sizes suffices.
        if replaces and manifest:
            difference = difference or publish.find_damage(prefix, manifest)
        if difference:
            self._report_replaced(key, difference)
        return None if difference else manifest

    def _report_replaced(self, key: str, reason: str) -> None:
        """Report once why the existing files are replaced."""
        if key not in self._reported:
            self._reported.add(key)
            self.say(f"{self._build_prefix(key)}: replaced: {reason}")

    def _find_difference(self, key: str, manifest: TokenFileManifest) -> str:
        """Describe how the existing output differs from this job; empty if it does not."""
        before, tokenizer = manifest.tokenizer, self.tokenizer
        asked = (tokenizer.fingerprint, tokenizer.eod) if tokenizer else (self.job.tokenizer, END_OF_TEXT)
        if asked != (before.fingerprint if tokenizer else before.name, before.eod):
            return f"its tokenizer is {before.name} with {before.eod}"
        recipe = self._build_recipe(key)
        for name in EncodeRecipe.__struct_fields__:
            if name != "max_bad" and getattr(recipe, name) != getattr(manifest.recipe, name):
                return f"its {name} is {getattr(manifest.recipe, name)}"
        if manifest.bad_documents > recipe.max_bad:
            return f"{manifest.bad_documents} bad documents were skipped"
        return self.text.describe_difference(manifest.inputs)

    def _load_or_train_tokenizer(self, key: str) -> Tokenizer | None:
        """The job's tokenizer, trained by the first process that needs it; None if the output has been published."""
        if not self.tokenizer:
            job, path = self.job, self.folder.path
            # With the lock also where it is trained already: `train_tokenizer_once` then reads it.
            with self._hold_lock("train a tokenizer for"):
                # While this process waited, others may have trained, published and removed the folder with it.
                if self._find_prepared(key):
                    return None
                self.say(f"training a byte-level BPE on {self.text}: {job.tokenizer}")
                self.tokenizer = trained.train_tokenizer_once(
                    job.tokenizer, self.text, job.json_keys, job.recipe, path, job.fast
                )
        return self.tokenizer

    def _hold_lock(self, purpose: str) -> AbstractContextManager[None]:
        waiting = f"to {purpose} {self.job.output}"
        return atomic.hold_lock(
            self.folder.lock, LOCK_TIMEOUT_S, lambda holder: self.say(f"waiting for {holder} {waiting}")
        )

    def _choose_num_workers(self, queue: ShardQueue) -> int | None:
        """Number of processes to start; None for one per core, 0 to process a single shard in this process."""
        if self.job.executor == "local" and len(queue.shards) == 1:
            return 0
        if self.job.workers or self.job.executor != "local":
            return self.job.workers
        return None if self.text.num_bytes >= PARALLEL_BYTES else 1

    def _build_prefix(self, key: str) -> Path:
        return output_prefix(self.job, key)

    def _build_recipe(self, key: str) -> EncodeRecipe:
        return msgspec.structs.replace(self.job.recipe, json_key=key)
