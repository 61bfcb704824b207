from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from primus.data.encode import shuffle
from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.megatron.indexed_dataset import IndexedTokens
from primus.data.megatron.manifest import EncodeRecipe, TokenFileManifest
from primus.data.readers import shard as shards
from primus.data.shards import shard_queue
from primus.data.shards.shard_queue import ShardOutput, ShardQueue, ShardResult
from primus.errors import PrimusError

Prose = Callable[..., str]

NUM_DOCUMENTS = 400


@pytest.fixture
def corpus(tmp_path: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of 1 to 40 words in some ten shards."""
    monkeypatch.setattr(shards, "SMALLEST_SHARD_BYTES", 4000)
    path = tmp_path / "corpus.jsonl"
    lines = (json.dumps({"text": f"{number} {prose(1 + number % 40, number)}"}) for number in range(NUM_DOCUMENTS))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def encoded(text: Path, tokenizer: Path, output: Path, seed: int | None = 0, workers: int = 1) -> TokenFileManifest:
    recipe = EncodeRecipe(shuffle_seed=seed)
    job = EncodeJob(inputs=(str(text),), tokenizer=str(tokenizer), output=output, recipe=recipe, workers=workers)
    return prepare_token_files(job)[0].manifest


def documents_of(output: Path) -> list[tuple[int, ...]]:
    tokens = IndexedTokens(output.with_name(f"{output.name}_text_document"))
    borders = tokens.borders.tolist()
    return [tuple(id for sequence in range(*each) for id in tokens[sequence].tolist()) for each in pairwise(borders)]


def places(output: Path, plain: Path) -> list[int]:
    """Where each document of a shuffled file is in the plain one."""
    found = {document: number for number, document in enumerate(documents_of(plain))}
    return [found[document] for document in documents_of(output)]


@pytest.mark.parametrize("merged_tokens", [50, 1 << 22])
def test_all_documents_are_there_once_in_another_order(
    tmp_path: Path, corpus: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, merged_tokens: int
) -> None:
    monkeypatch.setattr(shuffle, "MERGED_TOKENS", merged_tokens)
    encoded(corpus, tokenizer_file, tmp_path / "plain", seed=None)
    manifest = encoded(corpus, tokenizer_file, tmp_path / "out")
    order = places(tmp_path / "out", tmp_path / "plain")
    assert sorted(order) == list(range(NUM_DOCUMENTS))
    assert np.abs(np.diff(order)).mean() == pytest.approx(NUM_DOCUMENTS / 3, rel=0.15)
    assert manifest.recipe.shuffle_seed == 0
    assert not (tmp_path / ".out.work").exists()


def test_the_order_depends_on_the_seed_alone(
    tmp_path: Path, corpus: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = encoded(corpus, tokenizer_file, tmp_path / "one")
    three = encoded(corpus, tokenizer_file, tmp_path / "three", workers=3)
    monkeypatch.setattr(shuffle, "MERGED_TOKENS", 100)
    in_pieces = encoded(corpus, tokenizer_file, tmp_path / "pieces")
    other = encoded(corpus, tokenizer_file, tmp_path / "other", seed=1)
    assert one.bin == three.bin == in_pieces.bin
    assert one.idx == three.idx == in_pieces.idx
    assert one.fingerprint == in_pieces.fingerprint != other.fingerprint
    assert Counter(documents_of(tmp_path / "one")) == Counter(documents_of(tmp_path / "other"))


def test_each_document_may_come_anywhere(tmp_path: Path, tokenizer_file: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "a" * (number + 1)}) + "\n" for number in range(4)))
    encoded(text, tokenizer_file, tmp_path / "plain", seed=None)
    table = np.zeros((4, 4))
    for seed in range(48):
        encoded(text, tokenizer_file, tmp_path / f"out{seed}", seed)
        for place, document in enumerate(places(tmp_path / f"out{seed}", tmp_path / "plain")):
            table[place, document] += 1
    chi_squared = float(((table - 12) ** 2).sum() / 12)
    assert chi_squared < 9 + 5 * np.sqrt(2 * 9)


def test_the_sequences_of_a_long_text_stay_together(tmp_path: Path, tokenizer_file: Path, prose: Prose) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(prose(30_000 if number % 2 else 50, number))
    encoded(folder, tokenizer_file, tmp_path / "plain", seed=None)
    manifest = encoded(folder, tokenizer_file, tmp_path / "out", seed=3)
    assert manifest.sequences > manifest.documents == 6
    assert sorted(places(tmp_path / "out", tmp_path / "plain")) == list(range(6))
    assert places(tmp_path / "out", tmp_path / "plain") != list(range(6))


def test_an_interrupted_shuffle_goes_on_with_the_shards_that_are_left(
    tmp_path: Path, corpus: Path, tokenizer_file: Path
) -> None:
    expected = encoded(corpus, tokenizer_file, tmp_path / "whole")

    def interrupted() -> None:
        done = 0
        commit = ShardOutput.commit

        def stop_after_three(output: ShardOutput, shard: shards.Shard) -> ShardResult:
            nonlocal done
            done += 1
            if done == 4:
                raise KeyboardInterrupt
            return commit(output, shard)

        shard_queue.ShardOutput.commit = stop_after_three  # type: ignore[assignment,method-assign]
        encoded(corpus, tokenizer_file, tmp_path / "out")

    process = multiprocessing.get_context("fork").Process(target=interrupted)
    process.start()
    process.join(60)
    assert process.exitcode == 1
    rows = list((tmp_path / ".out.work").glob("*/*.json"))
    assert 1 <= len(rows) <= 4
    before = {path: path.stat().st_mtime_ns for path in rows}
    kept: list[dict[Path, int]] = []
    merge = shuffle.merge_sorted

    def look(queue: ShardQueue, rows: list[ShardResult], dtype: np.dtype[np.uint16]) -> object:
        kept.append({path: path.stat().st_mtime_ns for path in before})
        return merge(queue, rows, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "merge_sorted", look)
        found = encoded(corpus, tokenizer_file, tmp_path / "out")
    assert kept == [before]
    assert (found.bin, found.idx) == (expected.bin, expected.idx)


@pytest.mark.parametrize("suffix", shuffle.SUFFIXES)
def test_a_damaged_file_of_a_sorted_shard_is_noticed(
    tmp_path: Path, corpus: Path, tokenizer_file: Path, suffix: str
) -> None:
    merge = shuffle.merge_sorted

    def fail(queue: ShardQueue, rows: list[ShardResult], dtype: np.dtype[np.uint16]) -> object:
        raise PrimusError("stopped", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "merge_sorted", fail)
        with pytest.raises(PrimusError, match="stopped"):
            encoded(corpus, tokenizer_file, tmp_path / "out")
    damaged = sorted((tmp_path / ".out.work").glob(f"*/*.{suffix}"))[2]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(PrimusError, match=rf"{suffix}: damaged since it was written: its checksum differs"):
        encoded(corpus, tokenizer_file, tmp_path / "out")
    assert not list(tmp_path.glob("out_text_document*"))
    assert merge is shuffle.merge_sorted
    again = encoded(corpus, tokenizer_file, tmp_path / "out")
    assert again.bin == encoded(corpus, tokenizer_file, tmp_path / "other").bin


def test_another_order_at_the_same_output_is_refused(tmp_path: Path, corpus: Path, tokenizer_file: Path) -> None:
    encoded(corpus, tokenizer_file, tmp_path / "out")
    with pytest.raises(PrimusError, match="its shuffle_seed is 0"):
        encoded(corpus, tokenizer_file, tmp_path / "out", seed=None)
