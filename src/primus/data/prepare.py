"""Token files from text: read, tokenize, write, and leave everything as it was if anything goes wrong."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

import primus
from primus import registry
from primus.data import atomic, corpus, documents
from primus.data import manifest as manifests
from primus.data import tokenizer as tokenizers
from primus.data.corpus import Corpus
from primus.data.documents import Bad, Text
from primus.data.encode import Encoded, encode
from primus.data.indexed import IndexedWriter, bin_path, idx_path, smallest_dtype
from primus.data.manifest import FileFacts, Manifest, Recipe, TokenizerFacts
from primus.data.tokenizer import Tokenizer
from primus.data.tokenizers.trained import train_byte_level_bpe
from primus.errors import PrimusError, UsageError

BPE = "bpe:"
TRAINING_CHARACTERS = 32_000_000
"""Text that a tokenizer is trained on at most; more costs memory and changes little."""

PARALLEL_BYTES = 32_000_000
"""Size of the input from which starting more processes pays."""

LOCK_TIMEOUT_S = 3600.0
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

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
    recipe: Recipe = field(default_factory=Recipe)
    """Settings that decide the tokens."""
    workers: int | None = None
    """Processes that tokenize; chosen from the size of the input when None."""
    existing: Literal["check", "keep", "replace"] = "check"
    """Files that are there already must be the same, are kept whatever they were made from, or are replaced."""


@dataclass(frozen=True)
class Prepared:
    """One pair of token files."""

    prefix: Path
    """Path without extension."""
    manifest: Manifest
    """What it holds."""
    made: bool
    """Whether it was made now; false if it was there."""


@dataclass
class Progress:
    """What a job has read and written so far."""

    documents: int = 0
    tokens: int = 0
    characters: int = 0
    empty: int = 0
    special_strings: int = 0
    bad: list[Bad] = field(default_factory=list)

    def add(self, encoded: Encoded) -> None:
        """Count a batch."""
        self.documents += int(encoded.ends_document.sum())
        self.tokens += len(encoded.tokens)
        self.characters += encoded.characters
        self.empty += encoded.empty
        self.special_strings += encoded.special_strings


def prepare(
    job: Job, say: Say = lambda text: None, show: Callable[[Progress], None] = lambda progress: None
) -> list[Prepared]:
    """Make the token files of a job, one pair for each JSON key; the same job again finds them made.

    Files appear complete or not at all, the manifest last. One process at a time prepares an output; others wait.

    Args:
        job: What to prepare.
        say: Receives lines for people.
        show: Receives the progress after each batch.

    Raises:
        UsageError: An input is missing, empty or unknown, the tokenizer too, or other data is at the output.
        PrimusError: A document is bad, a file damaged, or the output cannot be written.
    """
    _check(job)
    tokenizer = None if _trains(job) else tokenizers.load(job.tokenizer, job.eod, job.recipe.parse_special_tokens)
    text = corpus.open_dataset(job.dataset, job.recipe) if job.dataset else corpus.open_files(job.inputs, job.recipe)
    try:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        lock = job.output.with_name(f".{job.output.name}.lock")
        with atomic.lock(lock, LOCK_TIMEOUT_S, lambda holder: say(f"waiting for {holder} to prepare {job.output}")):
            atomic.remove_stale(job.output.parent, job.output.name)
            return _prepare_locked(job, tokenizer, text, say, show)
    except OSError as error:
        raise _cannot_write(job.output, error) from None


def output_prefix(job: Job, key: str) -> Path:
    """Prefix of the token files of one JSON key."""
    return job.output.with_name(f"{job.output.name}_{key}_document")


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
    if _trains(job) and not job.tokenizer.removeprefix(BPE).isdecimal():
        raise UsageError(f"tokenizer '{job.tokenizer}'", "give the number of tokens, like bpe:8192")
    if _trains(job) and job.eod not in (None, tokenizers.END_OF_TEXT):
        raise UsageError(f"a trained tokenizer has {tokenizers.END_OF_TEXT}, not {job.eod}", "leave --eod out")


def _trains(job: Job) -> bool:
    return job.tokenizer.startswith(BPE)


def _prepare_locked(
    job: Job, tokenizer: Tokenizer | None, text: Corpus, say: Say, show: Callable[[Progress], None]
) -> list[Prepared]:
    prefixes = {key: output_prefix(job, key) for key in job.json_keys}
    if job.existing == "keep":
        kept = {prefix: manifests.read(prefix) for prefix in prefixes.values()}
        if all(kept.values()):
            return [Prepared(prefix, manifest, made=False) for prefix, manifest in kept.items() if manifest]
    found = {key: _existing(job, key, tokenizer, text) for key in job.json_keys}
    prepared = []
    for key, prefix in prefixes.items():
        if manifest := found[key]:
            say(f"{prefix}: nothing to do, it was made from the same input before")
        else:
            tokenizer = tokenizer or _train(job, text, say)
            manifest = _make(job, key, tokenizer, text, show)
            _tell(prefix, manifest, say)
        prepared.append(Prepared(prefix, manifest, made=not found[key]))
    return prepared


def _existing(job: Job, key: str, tokenizer: Tokenizer | None, text: Corpus) -> Manifest | None:
    """The manifest at the output if the same job has made it.

    Raises:
        UsageError: There is something else, and the job does not replace it.
    """
    prefix = output_prefix(job, key)
    if job.existing != "check":
        return None
    manifest = manifests.read(prefix)
    if manifest:
        difference = _difference(job, key, tokenizer, text, manifest)
    else:
        difference = "it has no manifest" if idx_path(prefix).exists() or bin_path(prefix).exists() else ""
    if difference:
        raise UsageError(
            f"{prefix}.bin is there already and was made otherwise: {difference}",
            "give another --output, or replace it with --overwrite",
        )
    return manifest


def _difference(job: Job, key: str, tokenizer: Tokenizer | None, text: Corpus, manifest: Manifest) -> str:
    """Why what is there did not come from this job; empty if it did."""
    before = manifest.tokenizer
    asked = (tokenizer.fingerprint, tokenizer.eod) if tokenizer else (job.tokenizer, tokenizers.END_OF_TEXT)
    if asked != (before.fingerprint if tokenizer else before.name, before.eod):
        return f"its tokenizer is {before.name} with {before.eod}"
    recipe = _recipe(job, key)
    for name in Recipe.__struct_fields__:
        if getattr(recipe, name) != getattr(manifest.recipe, name):
            return f"its {name} is {getattr(manifest.recipe, name)}"
    old, new = ({facts.path: facts.sha256 for facts in each} for each in (manifest.inputs, text.facts))
    changed = [path for path in (old | new) if old.get(path) != new.get(path)]
    if changed:
        return f"{changed[0]} is new, gone or changed"
    return "" if list(old) == list(new) else "its inputs have another order"


def _recipe(job: Job, key: str) -> Recipe:
    return msgspec.structs.replace(job.recipe, json_key=key)


def _train(job: Job, text: Corpus, say: Say) -> Tokenizer:
    """A byte-level BPE trained on an even sample of the documents."""
    vocab_size = int(job.tokenizer.removeprefix(BPE))
    say(f"training a byte-level BPE of {vocab_size} tokens on {job.dataset or ', '.join(job.inputs)}")
    every = max(1, -(-text.num_bytes // TRAINING_CHARACTERS))
    pieces = (piece for key in job.json_keys for piece in _good(text.read(key), job.recipe.max_bad, Progress()))
    trained = train_byte_level_bpe(_sample((piece.text for piece in pieces), every), vocab_size)
    return tokenizers.from_content(trained.content, job.tokenizer, trained.eod, job.recipe.parse_special_tokens)


def _sample(texts: Iterable[str], every: int) -> Iterator[str]:
    """Every n-th text, up to `TRAINING_CHARACTERS` in all: compressed files hold more than their size tells."""
    left = TRAINING_CHARACTERS
    for number, text in enumerate(texts):
        if number % every == 0:
            yield text
            left -= len(text)
        if left <= 0:
            return


def _good(items: Iterable[Text | Bad], max_bad: int, progress: Progress) -> Iterator[Text]:
    """The texts; bad documents are remembered.

    Raises:
        PrimusError: There are more than `max_bad`.
    """
    for item in items:
        if isinstance(item, Text):
            yield item
            continue
        progress.bad.append(item)
        if len(progress.bad) > max_bad:
            more = f" (bad document {len(progress.bad)} of at most {max_bad})" if max_bad else ""
            raise PrimusError(
                f"{item.where}: {item.reason}{more}", "correct it, or leave out up to N bad documents with --max-bad N"
            )


def _make(job: Job, key: str, tokenizer: Tokenizer, text: Corpus, show: Callable[[Progress], None]) -> Manifest:
    """Write the token files of one key under temporary names, then give everything its name."""
    if job.recipe.append_eod and tokenizer.eod is None:
        raise UsageError(
            f"{tokenizer.name}: no token that ends a document", "name it with --eod, or use --no-append-eod"
        )
    prefix, progress = output_prefix(job, key), Progress()
    with IndexedWriter(prefix, smallest_dtype(tokenizer.vocab_size)) as writer:
        texts = _good(text.read(key), job.recipe.max_bad, progress)
        for encoded in encode(texts, tokenizer, job.recipe, _num_workers(job, text)):
            writer.add(encoded.tokens, encoded.lengths, encoded.ends_document)
            progress.add(encoded)
            show(progress)
        if not writer.num_tokens:
            raise UsageError(f"no text in {job.dataset or ', '.join(job.inputs)}", "every document is empty")
        text.check_unchanged()
        writer.finish()
        manifest = _describe(job, key, tokenizer, text, writer, progress)
        with atomic.staged(_companions(prefix, tokenizer, manifest, progress.bad)) as publish:
            manifests.manifest_path(prefix).unlink(missing_ok=True)
            _bad_path(prefix).unlink(missing_ok=True)
            writer.commit()
            publish()
    return manifest


def _num_workers(job: Job, text: Corpus) -> int:
    if job.workers:
        return job.workers
    return _num_cores() if text.num_bytes >= PARALLEL_BYTES else 1


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _describe(
    job: Job, key: str, tokenizer: Tokenizer, text: Corpus, writer: IndexedWriter, progress: Progress
) -> Manifest:
    return Manifest(
        primus=primus.__version__,
        tokenizer=TokenizerFacts(
            name=job.tokenizer,
            file=_tokenizer_path(writer.prefix).name,
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            eod_id=tokenizer.eod_id,
        ),
        recipe=_recipe(job, key),
        inputs=text.facts,
        documents=writer.num_documents,
        sequences=writer.num_sequences,
        tokens=writer.num_tokens,
        characters=progress.characters,
        max_token_id=writer.max_token,
        dtype=writer.dtype.name,
        empty_documents=progress.empty,
        bad_documents=len(progress.bad),
        special_strings=progress.special_strings,
        bin=FileFacts(bytes=writer.sizes["bin"], sha256=writer.checksums["bin"]),
        idx=FileFacts(bytes=writer.sizes["idx"], sha256=writer.checksums["idx"]),
    )


def _companions(prefix: Path, tokenizer: Tokenizer, manifest: Manifest, bad: list[Bad]) -> dict[Path, bytes]:
    """The small files beside the tokens, the manifest last."""
    files = {_tokenizer_path(prefix): tokenizer.content}
    if bad:
        files[_bad_path(prefix)] = b"".join(msgspec.json.encode(each) + b"\n" for each in bad)
    files[manifests.manifest_path(prefix)] = manifests.encoded(manifest)
    return files


def _tokenizer_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".tokenizer.json")


def _bad_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bad.jsonl")


def _tell(prefix: Path, manifest: Manifest, say: Say) -> None:
    say(f"{prefix}: {manifest.tokens:,} tokens in {manifest.documents:,} documents ({manifest.dtype})")
    if manifest.empty_documents:
        say(f"  left out {manifest.empty_documents:,} documents without text")
    if manifest.bad_documents:
        say(f"  left out {manifest.bad_documents:,} bad documents, listed in {_bad_path(prefix)}")
    if manifest.special_strings:
        became = "its id" if manifest.recipe.parse_special_tokens else "plain text"
        say(f"  {manifest.tokenizer.eod} occurs {manifest.special_strings:,} times in the text and became {became}")


def _cannot_write(output: Path, error: OSError) -> PrimusError:
    reason = error.strerror or str(error)
    if error.errno not in FULL_DISK:
        return PrimusError(f"{error.filename or output}: cannot be written, {reason}", "give another --output")
    free = shutil.disk_usage(output.parent).free
    return PrimusError(
        f"{output}: cannot be written, {reason} ({free / 1e6:,.0f} MB are free)",
        "free some space or give an --output on another disk; what was there before is as it was",
    )
