"""Token files of encoded shards: joined under temporary names, described, and given their names in a safe order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import primus
from primus.data import atomic
from primus.data.encode.encode import EncodeStage
from primus.data.encode.merge import merge_shards
from primus.data.megatron import manifest as manifests
from primus.data.megatron.fingerprint import Fingerprint
from primus.data.megatron.indexed_dataset import IndexedWriter, bin_path, idx_path, smallest_dtype
from primus.data.megatron.manifest import FileFacts, TokenFileManifest, TokenizerFacts
from primus.data.shards.inputs import Inputs
from primus.data.shards.shard_queue import BadItem, ShardQueue, ShardResult, compute_checksum
from primus.data.tokenizers.content import fingerprint_content


def publish_token_files(
    board: ShardQueue,
    rows: Sequence[ShardResult],
    prefix: Path,
    text: Inputs,
    tokenizer_name: str,
    begin: Callable[[], None],
) -> TokenFileManifest:
    """Make the token files of all shards of an `EncodeStage`; call it with the lock of the output held.

    Args:
        board: The shards.
        rows: Their rows, in order.
        prefix: Path of the files without extension.
        text: What they were made from.
        tokenizer_name: The tokenizer as it was asked for.
        begin: Called before the first file that was at `prefix` is replaced.

    Returns:
        The manifest of what was published.

    Raises:
        PrimusError: An input has changed, or the file of a shard is damaged.
        OSError: The files cannot be written; what was there is as it was.
    """
    assert isinstance(board.stage, EncodeStage)
    atomic.remove_stale(prefix.parent, prefix.name)
    text.check_unchanged()
    with IndexedWriter(prefix, smallest_dtype(board.stage.tokenizer.vocab_size)) as writer:
        fingerprint = merge_shards(board, rows, writer)
        writer.finish_files()
        manifest = _build_manifest(board.stage, rows, writer, fingerprint, text, tokenizer_name)
        bad = [item for row in rows for item in row.bad]
        with atomic.stage_files(_encode_companions(prefix, board.stage, manifest, bad)) as publish_companions:
            begin()
            manifests.manifest_path(prefix).unlink(missing_ok=True)
            _bad_path(prefix).unlink(missing_ok=True)
            writer.commit()
            publish_companions()
    return manifest


def find_damage(prefix: Path, manifest: TokenFileManifest) -> str:
    """What is not as it was written of the files that a manifest describes; empty where all is."""
    for path, facts in ((bin_path(prefix), manifest.bin), (idx_path(prefix), manifest.idx)):
        if compute_checksum(path) != facts.xxh3:
            return f"{path} is damaged, its checksum is another"
    path = prefix.with_name(manifest.tokenizer.file)
    try:
        same = fingerprint_content(path.read_bytes()) == manifest.tokenizer.fingerprint
    except (OSError, msgspec.MsgspecError):
        same = False
    return "" if same else f"{path} is missing or damaged"


def report_prepared(
    prefix: Path, manifest: TokenFileManifest, rows: Sequence[ShardResult], say: Callable[[str], None]
) -> None:
    """Print the counts, what was skipped, and warnings."""
    say(f"{prefix}: {manifest.tokens:,} tokens in {manifest.documents:,} documents ({manifest.dtype})")
    if manifest.empty_documents:
        say(f"  skipped {manifest.empty_documents:,} documents without text")
    if manifest.bad_documents:
        say(f"  skipped {manifest.bad_documents:,} bad documents, listed in {_bad_path(prefix)}")
    if manifest.special_strings:
        became = "its id" if manifest.recipe.parse_special_tokens else "plain text"
        say(f"  {manifest.tokenizer.eod} occurs {manifest.special_strings:,} times in the text and became {became}")
    if failure := next((row.facts["fast_failure"] for row in rows if "fast_failure" in row.facts), ""):
        say(f"  the fast tokenizer failed ({failure}); the library encoded in its place: the same tokens, but slower")


def _build_manifest(
    stage: EncodeStage,
    rows: Sequence[ShardResult],
    writer: IndexedWriter,
    fingerprint: Fingerprint,
    text: Inputs,
    tokenizer_name: str,
) -> TokenFileManifest:
    counts = Counter[str]()
    for row in rows:
        counts.update(row.counts)
    tokenizer = stage.tokenizer
    return TokenFileManifest(
        primus=primus.__version__,
        tokenizer=TokenizerFacts(
            name=tokenizer_name,
            file=_tokenizer_path(writer.prefix, stage).name,
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            eod_id=tokenizer.eod_id,
        ),
        recipe=stage.recipe,
        inputs=text.collect_facts([row.facts["contents"] for row in rows]),
        documents=writer.num_documents,
        sequences=writer.num_sequences,
        tokens=writer.num_tokens,
        characters=counts["characters"],
        max_token_id=max(row.facts["largest"] for row in rows),
        dtype=writer.dtype.name,
        empty_documents=counts["empty"],
        bad_documents=sum(len(row.bad) for row in rows),
        special_strings=counts["special_strings"],
        bin=FileFacts(bytes=writer.sizes["bin"], xxh3=writer.checksums["bin"]),
        idx=FileFacts(bytes=writer.sizes["idx"], xxh3=writer.checksums["idx"]),
        fingerprint=fingerprint.compute_fingerprint(),
        pieces=fingerprint.compute_pieces(),
    )


def _encode_companions(
    prefix: Path, stage: EncodeStage, manifest: TokenFileManifest, bad: Sequence[BadItem]
) -> dict[Path, bytes]:
    """The small files beside the tokens, the manifest last."""
    files = {_tokenizer_path(prefix, stage): stage.tokenizer.content}
    if bad:
        files[_bad_path(prefix)] = b"".join(msgspec.json.encode(each) + b"\n" for each in bad)
    files[manifests.manifest_path(prefix)] = manifests.encode_manifest(manifest)
    return files


def _tokenizer_path(prefix: Path, stage: EncodeStage) -> Path:
    return prefix.with_name(f"{prefix.name}.tokenizer{stage.tokenizer.file_suffix}")


def _bad_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.bad.jsonl")
