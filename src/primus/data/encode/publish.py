"""Publish token files: merge encoded shards under temporary names, write the manifest, and rename in a safe order.

The order of the renames, of which each is synced to disk before the next:
    1. mark the key as being published; delete the manifest and the list of bad documents
    2. delete the index, rename the .bin, rename the .idx
    3. rename the tokenizer, the list of bad documents, and last the manifest
A reader that finds a manifest therefore finds the files that it describes. A crash before 1 leaves the existing files
unchanged; a crash later leaves the mark, and the next run publishes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import primus
from primus.data import atomic
from primus.data.encode.encode import EncodeFacts, EncodeStage
from primus.data.encode.merge import merge_shards
from primus.data.megatron import manifest as manifests
from primus.data.megatron.fingerprint import Fingerprint
from primus.data.megatron.indexed_dataset import IndexedWriter, bin_path, choose_smallest_dtype, idx_path
from primus.data.megatron.manifest import FileFacts, TokenFileManifest, TokenizerFacts
from primus.data.shards.inputs import Inputs
from primus.data.shards.shard_queue import BadItem, ShardQueue, ShardResult, compute_checksum
from primus.data.tokenizers.content import fingerprint_content


def publish_token_files(
    queue: ShardQueue,
    results: Sequence[ShardResult],
    prefix: Path,
    text: Inputs,
    tokenizer_name: str,
    begin: Callable[[], None],
) -> TokenFileManifest:
    """Publish the token files of all shards of an `EncodeStage`. Call it with the lock of the output held.

    Args:
        queue: The shard queue.
        results: Results of all shards, in order.
        prefix: Path of the files without extension.
        text: Input of the shards.
        tokenizer_name: The tokenizer as the user named it.
        begin: Called before the first existing file at `prefix` is replaced; sets the mark of step 1.

    Returns:
        The manifest of the published files.

    Raises:
        PrimusError: An input has changed, or a file of a shard is damaged.
        OSError: The files cannot be written; existing files are unchanged.
    """
    assert isinstance(queue.stage, EncodeStage)
    # The lock of the output is held, so temporary files of this prefix belong to killed publishers.
    atomic.remove_stale(prefix.parent, prefix.name)
    # The manifest describes the inputs as they are now; the shards may be from an earlier run.
    text.check_unchanged()
    with IndexedWriter(prefix, choose_smallest_dtype(queue.stage.tokenizer.vocab_size)) as writer:
        fingerprint = merge_shards(queue, results, writer)
        writer.finish_files()
        manifest = _build_manifest(queue.stage, results, writer, fingerprint, text, tokenizer_name)
        bad = [item for result in results for item in result.bad]
        # All files are complete under temporary names when the block begins; inside, only renames and deletions happen.
        with atomic.stage_files(_encode_companions(prefix, queue.stage, manifest, bad)) as publish_companions:
            begin()
            # Delete the old manifest first: a reader must not combine it with the new files.
            atomic.delete_file(manifests.manifest_path(prefix))
            atomic.delete_file(_build_bad_path(prefix))
            writer.commit()
            publish_companions()
    return manifest


def find_damage(prefix: Path, manifest: TokenFileManifest) -> str:
    """Describe the first damaged or missing file of a manifest; empty if all checksums match."""
    # Reading the manifest has compared the sizes; this reads every byte.
    for path, facts in ((bin_path(prefix), manifest.bin), (idx_path(prefix), manifest.idx)):
        if compute_checksum(path) != facts.xxh3:
            return f"{path} is damaged, its checksum differs"
    path = prefix.with_name(manifest.tokenizer.file)
    try:
        same = fingerprint_content(path.read_bytes()) == manifest.tokenizer.fingerprint
    except (OSError, msgspec.MsgspecError):
        same = False
    return "" if same else f"{path} is missing or damaged"


def report_prepared(
    prefix: Path, manifest: TokenFileManifest, results: Sequence[ShardResult], say: Callable[[str], None]
) -> None:
    """Print the counts, what was skipped, and warnings."""
    say(f"{prefix}: {manifest.tokens:,} tokens in {manifest.documents:,} documents ({manifest.dtype})")
    if manifest.empty_documents:
        say(f"  skipped {manifest.empty_documents:,} documents without text")
    if manifest.bad_documents:
        say(f"  skipped {manifest.bad_documents:,} bad documents, listed in {_build_bad_path(prefix)}")
    if manifest.special_strings:
        became = "its id" if manifest.recipe.parse_special_tokens else "plain text"
        say(f"  {manifest.tokenizer.eod} occurs {manifest.special_strings:,} times in the text and became {became}")
    if failure := next(filter(None, (result.read_facts(EncodeFacts).fast_failure for result in results)), ""):
        say(f"  the fast tokenizer failed ({failure}); used the tokenizers library instead (same tokens, slower)")


def _build_manifest(
    stage: EncodeStage,
    results: Sequence[ShardResult],
    writer: IndexedWriter,
    fingerprint: Fingerprint,
    text: Inputs,
    tokenizer_name: str,
) -> TokenFileManifest:
    counts = Counter[str]()
    for result in results:
        counts.update(result.counts)
    tokenizer, facts = stage.tokenizer, [result.read_facts(EncodeFacts) for result in results]
    return TokenFileManifest(
        primus=primus.__version__,
        tokenizer=TokenizerFacts(
            name=tokenizer_name,
            file=_build_tokenizer_path(writer.prefix, stage).name,
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            eod_id=tokenizer.eod_id,
        ),
        recipe=stage.recipe,
        inputs=text.collect_facts([each.contents for each in facts]),
        documents=writer.num_documents,
        sequences=writer.num_sequences,
        tokens=writer.num_tokens,
        characters=counts["characters"],
        max_token_id=max(each.largest for each in facts),
        dtype=writer.dtype.name,
        empty_documents=counts["empty"],
        bad_documents=sum(len(result.bad) for result in results),
        special_strings=counts["special_strings"],
        bin=FileFacts(bytes=writer.sizes["bin"], xxh3=writer.checksums["bin"]),
        idx=FileFacts(bytes=writer.sizes["idx"], xxh3=writer.checksums["idx"]),
        fingerprint=fingerprint.compute_fingerprint(),
        pieces=fingerprint.compute_pieces(),
    )


def _encode_companions(
    prefix: Path, stage: EncodeStage, manifest: TokenFileManifest, bad: Sequence[BadItem]
) -> dict[Path, bytes]:
    """Content of the small files next to the token files, in the order of renaming: the manifest is last."""
    files = {_build_tokenizer_path(prefix, stage): stage.tokenizer.content}
    if bad:
        files[_build_bad_path(prefix)] = b"".join(msgspec.json.encode(each) + b"\n" for each in bad)
    files[manifests.manifest_path(prefix)] = manifests.encode_manifest(manifest)
    return files


def _build_tokenizer_path(prefix: Path, stage: EncodeStage) -> Path:
    return prefix.with_name(f"{prefix.name}.tokenizer{stage.tokenizer.file_suffix}")


def _build_bad_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.bad.jsonl")
