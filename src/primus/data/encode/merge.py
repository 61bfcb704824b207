"""Merge the files of encoded shards into one pair of token files, and verify the checksum of each shard file."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import xxhash

from primus.data.encode import shuffle
from primus.data.encode.encode import EncodeStage
from primus.data.megatron.fingerprint import Fingerprint
from primus.data.megatron.indexed_dataset import IndexedWriter
from primus.data.shards.shard_queue import ShardQueue, ShardResult
from primus.errors import PrimusError

SEQUENCES = 1 << 17
"""Sequences read at a time: 512 KiB of lengths."""
TOKEN_BYTES = 1 << 20
"""Tokens read at a time: they stay in a core's cache while the checksums are computed."""


def merge_shards(queue: ShardQueue, results: Sequence[ShardResult], writer: IndexedWriter) -> Fingerprint:
    """Append the sequences of all shards, in constant memory.

    Args:
        queue: Shard queue of an `EncodeStage`.
        results: Results of all shards, in order.
        writer: Receives the sequences.

    Returns:
        The fingerprint of the appended sequences.

    Raises:
        PrimusError: A file of a shard is damaged. The shard is reopened, so that the next run encodes it again.
    """
    fingerprint = Fingerprint()
    assert isinstance(queue.stage, EncodeStage)
    if queue.stage.recipe.shuffle_seed is not None:
        # The merge reads the files of all shards in turn and by position, so they are verified in a pass before it.
        for result, suffix in product(results, shuffle.SUFFIXES):
            deque(_read_checked(queue, result, suffix, TOKEN_BYTES), maxlen=0)
        for batch in shuffle.merge_sorted(queue, results, writer.dtype.newbyteorder("<")):
            writer.add_tokens(batch.tokens)
            writer.add_sequences(batch.lengths, batch.ends_document)
            fingerprint.add_sequences(*batch)
        return fingerprint
    for result in results:
        for content in _read_checked(queue, result, "bin", TOKEN_BYTES):
            tokens = np.frombuffer(content, writer.dtype)
            writer.add_tokens(tokens)
            fingerprint.add_tokens(tokens)
        columns = zip(
            _read_checked(queue, result, "lengths", 4 * SEQUENCES),
            _read_checked(queue, result, "ends", SEQUENCES),
            strict=True,
        )
        for lengths, ends in columns:
            sequences = np.frombuffer(lengths, "<i4"), np.frombuffer(ends, np.bool_)
            writer.add_sequences(*sequences)
            # The tokens of these sequences are in the fingerprint already.
            fingerprint.add_sequences(np.empty(0, writer.dtype), *sequences)
    return fingerprint


def _read_checked(queue: ShardQueue, result: ShardResult, suffix: str, size: int) -> Iterator[memoryview]:
    """Read a file of a shard in pieces of `size` bytes, and check its size and checksum.

    A piece is valid until the next one is requested: all pieces share one buffer. The checksum is known after the last
    piece, so the caller must not publish anything before the iterator ends.
    """
    path, facts = queue.result_file(result, suffix), result.files[suffix]
    digest = xxhash.xxh3_128()
    buffer = bytearray(size)
    view = memoryview(buffer)
    with path.open("rb") as file:
        # A file of another size is not read: its tokens and lengths would not match those of the other files.
        whole = os.fstat(file.fileno()).st_size == facts.bytes
        while whole and (count := file.readinto(buffer)):
            digest.update(view[:count])
            yield view[:count]
    if not whole or digest.hexdigest() != facts.xxh3:
        queue.discard_result(result)
        raise PrimusError(
            f"{path}: damaged since it was written: {'its checksum' if whole else 'its size'} differs",
            "run the same command again, which encodes this shard again; if it repeats, the disk or memory is faulty",
        )
