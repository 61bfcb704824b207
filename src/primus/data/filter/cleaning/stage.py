"""The stage that applies the rules to the documents of a shard, and writes the kept documents."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import xxhash
from msgspec import Struct

from primus.data.filter.cleaning.block import DocumentBlock, Removal
from primus.data.filter.cleaning.recipe import CleaningRecipe
from primus.data.filter.cleaning.report import SAMPLES, RemovedSample, RuleRemovals, choose_samples
from primus.data.filter.whole_documents import DocumentReader, batch_documents
from primus.data.readers import TextDocument
from primus.data.readers.shard import Shard
from primus.data.shards import inputs
from primus.data.shards.document_writer import DocumentWriter, open_writer
from primus.data.shards.shard_queue import ShardOutput

BLOCK_CHARACTERS = 1 << 18
"""Characters in a block of documents, few enough for a core's cache."""
MANY_DOCUMENTS = 4096
SAMPLE_CHARACTERS = 400
REMOVED_BY = "removed_by"
"""Field of a removed document with the reason."""

Compression = Literal["zst", "gz", "none"]


def file_suffix(compression: Compression) -> str:
    """Suffix of the written files."""
    return "jsonl" if compression == "none" else f"jsonl.{compression}"


class CleanFacts(Struct, frozen=True, kw_only=True):
    """What the stage states about a shard, besides counts."""

    removed: list[RuleRemovals]
    edits: dict[str, int]
    samples: list[RemovedSample]
    contents: list[str]
    """Checksums of its input; see `inputs.hash_contents`."""


@dataclass
class CleanStage:
    """Writes the documents of each shard that the rules keep, and optionally the removed ones."""

    identity: Any
    """All settings that affect the files, except the shards."""
    recipe: CleaningRecipe
    key: str = "text"
    """Field or column of the text."""
    text_documents: str = "file"
    """Unit that is a document in a .txt file."""
    compression: Compression = "zst"
    keep_removed: bool = False

    def start(self) -> None:
        """Load the files of the rules and compile their kernels."""
        self.recipe.start()
        for rule in self.recipe.rules:
            block = DocumentBlock(["a word"], self.recipe.words)
            rule.apply(block)
            assert block.num_words >= 0, "words are compiled for too"

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Clean one shard."""
        reader = DocumentReader(self.key, self.text_documents, fields=True, bad=output.record_bad)
        with ExitStack() as stack:
            ending = file_suffix(self.compression)
            kept = stack.enter_context(open_writer(output.path(ending), self.key, self.compression))
            removed = None
            if self.keep_removed:
                path = output.path(f"removed.{ending}")
                removed = stack.enter_context(open_writer(path, self.key, self.compression))
            work = _ShardCleaner(self, shard, output, kept, removed)
            for documents in batch_documents(reader.read(shard), BLOCK_CHARACTERS, MANY_DOCUMENTS):
                work.clean_batch(documents)
        output.add_counts(empty=reader.empty)
        output.facts = work.collect_facts()


@dataclass
class _ShardCleaner:
    """Cleans one shard, and counts its removals and changes."""

    stage: CleanStage
    shard: Shard
    output: ShardOutput
    kept: DocumentWriter
    removed: DocumentWriter | None
    number: int = 0
    documents: Counter[tuple[str, str]] = field(default_factory=Counter)
    characters: Counter[tuple[str, str]] = field(default_factory=Counter)
    edits: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[RemovedSample, TextDocument]] = field(default_factory=list)
    highest: dict[str, int] = field(default_factory=dict)
    """Largest hash among the samples, for each rule that has enough; a sample needs a smaller one."""

    def clean_batch(self, documents: list[TextDocument]) -> None:
        """Apply the rules to documents, and write the kept ones."""
        block = DocumentBlock(
            [each.text for each in documents], self.stage.recipe.words, [each.fields for each in documents]
        )
        characters = sum(len(each.text) for each in documents)
        self.stage.recipe.apply(block)
        for document, text in enumerate(block.texts):
            if block.alive[document]:
                self.kept.write(documents[document], text)
        # Removals are grouped by rule; the file of removed documents has the order of the input.
        for removal in sorted(block.removals, key=lambda removal: removal.document):
            self._record_removal(documents[removal.document], removal)
        self.edits.update(block.edits)
        self.number += len(documents)
        self.output.add_counts(
            documents=len(documents),
            kept=int(block.alive.sum()),
            characters=characters,
            kept_characters=int(block.characters[block.alive].sum()),
            kept_words=int(block.num_words[block.alive].sum()),
        )

    def collect_facts(self) -> CleanFacts:
        """Facts for the result of the shard."""
        chosen = choose_samples(sample for sample, _ in self.samples)
        texts = {sample.order: text for sample, text in self.samples}
        placed = [msgspec.structs.replace(sample, where=texts[sample.order].where) for sample in chosen]
        removed = [
            RuleRemovals(rule=rule, reason=reason, documents=count, characters=self.characters[rule, reason])
            for (rule, reason), count in self.documents.items()
        ]
        contents = inputs.hash_contents(self.shard)
        return CleanFacts(removed=removed, edits=dict(self.edits), samples=placed, contents=contents)

    def _record_removal(self, document: TextDocument, removal: Removal) -> None:
        key = removal.rule, removal.reason
        self.documents[key] += 1
        self.characters[key] += len(document.text)
        self._record_sample(document, removal)
        if self.removed:
            why = {"where": document.where, **msgspec.to_builtins(removal)}
            why.pop("document")
            fields = {**(document.fields or {}), REMOVED_BY: why}
            self.removed.write(msgspec.structs.replace(document, fields=fields))

    def _record_sample(self, document: TextDocument, removal: Removal) -> None:
        """Keep a document as a sample if its hash is one of the smallest. Its place is determined at the end."""
        place = f"{self.shard.index} {self.number + removal.document}"
        # The smallest hashes of places are a random sample that does not depend on the number of workers or on the
        # order in which shards finish. The shift keeps them below 2 ** 63.
        order = xxhash.xxh3_64_intdigest(place.encode()) >> 1
        if order > self.highest.get(removal.rule, order):
            return
        sample = RemovedSample(
            order=order,
            where="",
            rule=removal.rule,
            reason=removal.reason,
            value=removal.value,
            limit=removal.limit,
            text=_shorten_text(document.text),
        )
        # The place is resolved from the document later: computing it may require reading the file, and most samples are
        # replaced.
        self.samples.append((sample, msgspec.structs.replace(document, text="", fields=None)))
        chosen = {sample.order for sample in choose_samples(sample for sample, _ in self.samples)}
        self.samples = [pair for pair in self.samples if pair[0].order in chosen]
        of_rule = [sample.order for sample, _ in self.samples if sample.rule == removal.rule]
        if len(of_rule) == SAMPLES:
            self.highest[removal.rule] = max(of_rule)


def _shorten_text(text: str) -> str:
    if len(text) <= SAMPLE_CHARACTERS:
        return text
    return f"{text[:SAMPLE_CHARACTERS]} ... ({len(text):,} characters)"
