from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.config.schema import DataConfig
from primus.config.token_files import count_documents, parse_split
from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.megatron import manifest as manifests
from primus.data.megatron.indexed_dataset import bin_path, idx_path
from primus.data.megatron.manifest import EncodeRecipe
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.data.tokenizers.trained import train_byte_level_bpe
from primus.data.training import dataset
from primus.data.training.blending import BlendedDataset
from primus.data.training.dataset import Datasets, open_datasets, split_borders
from primus.data.training.loader import Batches, BatchShape
from primus.data.training.packing import CACHED_BLOCKS, PackedDataset
from primus.errors import UsageError

WriteTokens = Callable[[str, Sequence[Sequence[int]]], Path]
Prepare = Callable[..., Path]

DOCUMENTS = [[number] * 20 for number in range(100)]


@pytest.fixture
def prepared(tmp_path: Path, tokenizer_file: Path, prose: Callable[..., str]) -> Prepare:
    """Prepare 200 documents and return their prefix."""

    def make(name: str = "corpus", tokenizer: Path = tokenizer_file, seed: int = 0) -> Path:
        lines = tmp_path / f"{name}.jsonl"
        lines.write_text("".join(json.dumps({"text": prose(60, seed + number)}) + "\n" for number in range(200)))
        job = EncodeJob(inputs=(str(lines),), tokenizer=str(tokenizer), output=tmp_path / name, recipe=EncodeRecipe())
        return prepare_token_files(job)[0].prefix

    return make


def opened(vocab_size: int = 1000, seq_length: int = 16, seed: int = 1, **settings: object) -> Datasets:
    return open_datasets(DataConfig(**settings), vocab_size, seq_length, seed)  # type: ignore[arg-type]


def packed(dataset: object) -> PackedDataset:
    assert isinstance(dataset, PackedDataset)
    return dataset


@pytest.mark.parametrize("ending", ["", ".bin", ".idx", "_text_document", "_text_document.idx"])
def test_a_prefix_is_found_however_it_is_written(write_tokens: WriteTokens, tmp_path: Path, ending: str) -> None:
    write_tokens("x_text_document", DOCUMENTS)
    if ending in (".bin", ".idx"):
        write_tokens("x", DOCUMENTS)
    assert packed(opened(train_data_path=str(tmp_path / f"x{ending}")).train).num_tokens == 99 * 20


def test_a_prefix_that_is_not_there_is_an_error_with_the_nearest(write_tokens: WriteTokens, tmp_path: Path) -> None:
    write_tokens("corpus_text_document", DOCUMENTS)
    with pytest.raises(UsageError, match=r"train_data_path: no .*corpsu_text_document\.idx") as caught:
        opened(train_data_path=str(tmp_path / "corpsu_text_document"))
    assert caught.value.hint == "did you mean 'corpus_text_document'?"
    with pytest.raises(UsageError, match="no such data") as caught:
        opened(train_data_path=str(tmp_path / "nowhere" / "x"))
    assert "does not exist" in caught.value.hint
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError) as caught:
        opened(train_data_path=str(tmp_path / "empty" / "x"))
    assert "data prepare" in caught.value.hint


def test_training_and_validation_are_different_documents(write_tokens: WriteTokens) -> None:
    data = opened(train_data_path=str(write_tokens("x", DOCUMENTS)), split="90,10,0")
    train, valid = packed(data.train), packed(data.valid)
    seen = [
        {token for index in range(one.samples_per_epoch) for token in one[index].tolist()} for one in (train, valid)
    ]
    assert seen[0] <= set(range(90))
    assert seen[1] <= set(range(90, 100))
    assert (train.num_tokens, valid.num_tokens) == (1800, 200)


def test_validation_data_of_its_own_leaves_the_training_data_whole(write_tokens: WriteTokens) -> None:
    train, valid = write_tokens("train", DOCUMENTS), write_tokens("valid", DOCUMENTS[:10])
    data = opened(train_data_path=str(train), valid_data_path=str(valid))
    assert (packed(data.train).num_tokens, packed(data.valid).num_tokens) == (2000, 200)


def test_too_little_validation_data_is_no_error_but_is_explained(write_tokens: WriteTokens) -> None:
    prefix = str(write_tokens("x", DOCUMENTS))
    assert "no documents for validation" in opened(train_data_path=prefix, split="100").no_valid
    short = opened(train_data_path=prefix, seq_length=64)
    assert short.valid is None
    assert "20 tokens in 1 documents" in short.no_valid
    alone = opened(train_data_path=str(write_tokens("one", [[1] * 500])))
    assert "no validation documents in a split of 1" in alone.no_valid


def test_documents_are_counted_by_the_index_alone(write_tokens: WriteTokens, tmp_path: Path) -> None:
    prefix = write_tokens("x", DOCUMENTS)
    assert count_documents(prefix) == len(DOCUMENTS)
    (tmp_path / "short.idx").write_bytes(prefix.with_suffix(".idx").read_bytes()[:20])
    (tmp_path / "other.idx").write_bytes(b"another format" * 10)
    assert [count_documents(tmp_path / name) for name in ("short", "other", "missing")] == [None] * 3


@given(
    count=st.integers(1, 10_000),
    shares=st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 1000)),
)
def test_a_split_covers_everything_and_every_share_has_something_where_it_can(
    count: int, shares: tuple[int, int, int]
) -> None:
    parts = parse_split(",".join(map(str, shares)))
    borders = split_borders(count, parts)
    assert (borders[0], borders[-1]) == (0, count)
    sizes = np.diff(borders)
    assert sizes.min() >= 0
    for size, share in zip(sizes, parts, strict=True):
        assert share > 0 or size == 0
        assert abs(size - count * share) <= 3
        assert count < 3 or share == 0 or size > 0


@given(
    count=st.integers(100, 2**31),
    shares=st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 1000)),
)
def test_a_split_is_rounded_as_megatron_does(count: int, shares: tuple[int, int, int]) -> None:
    """Each share begins and ends at a rounded product (blended_megatron_dataset_builder.py)."""
    ends = [0.0, *accumulate(share / sum(shares) for share in shares)]
    expected = [(round(start * float(count)), round(end * float(count))) for start, end in pairwise(ends)]
    if any(share and start == end for share, (start, end) in zip(shares, expected, strict=True)):
        return  # ours gives each share a document
    assert list(pairwise(split_borders(count, parse_split(",".join(map(str, shares)))))) == expected


def test_test_data_is_a_share_of_the_split_or_has_its_own_files(write_tokens: WriteTokens) -> None:
    train, other = str(write_tokens("x", DOCUMENTS)), str(write_tokens("y", DOCUMENTS[:10]))
    data = opened(train_data_path=train, split="80,10,10")
    assert [packed(part).num_tokens for part in (data.train, data.valid, data.test)] == [1600, 200, 200]
    data = opened(train_data_path=train, split="80,10,10", test_data_path=other)
    assert (packed(data.train).num_tokens, packed(data.test).num_tokens, data.valid) == (2000, 200, None)
    assert data.no_valid == "no validation data is named"
    assert opened(train_data_path=train).test is None
    fingerprints = {
        opened(train_data_path=train, **{key: other}).fingerprint for key in ("valid_data_path", "test_data_path")
    }
    assert len(fingerprints | {opened(train_data_path=train).fingerprint}) == 3


def test_training_validation_and_test_data_have_orders_of_their_own(write_tokens: WriteTokens) -> None:
    prefix = str(write_tokens("x", np.random.default_rng(0).integers(0, 999, (200, 20)).tolist()))
    data = opened(train_data_path=prefix, valid_data_path=prefix, test_data_path=prefix)
    assert data.valid and data.test
    for one, other in combinations((data.train, data.valid, data.test), 2):
        assert any(one[index].tolist() != other[index].tolist() for index in range(10))


@pytest.mark.parametrize("split", ["", "a,b", "0,1", "1,2,3,4", "-1,2", "nan", "inf,1"])
def test_a_split_that_makes_no_sense_is_an_error(write_tokens: WriteTokens, split: str) -> None:
    with pytest.raises(UsageError, match="split"):
        opened(train_data_path=str(write_tokens("x", DOCUMENTS)), split=split)


@pytest.mark.parametrize(
    ("form", "shares"),
    [
        ("list", {0: 0.75, 1: 0.25}),
        ("string", {0: 0.75, 1: 0.25}),
        ("by size", {0: 2 / 3, 1: 1 / 3}),
    ],
)
def test_a_blend_has_the_shares_that_were_asked_for(
    write_tokens: WriteTokens, form: str, shares: dict[int, float]
) -> None:
    one, two = str(write_tokens("one", [[0] * 20] * 200)), str(write_tokens("two", [[1] * 20] * 100))
    path = {"list": [3, one, 1, two], "string": f"0.3 {one} 0.1 {two}", "by size": [one, two]}[form]
    data = opened(train_data_path=path)
    assert isinstance(data.train, BlendedDataset)
    owners = [int(data.train[index][0]) for index in range(4000)]
    for owner, share in shares.items():
        assert owners.count(owner) / 4000 == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    "path",
    [
        ["0.5"],
        [0.5, "x", "x"],
        [0.5, "x", 0.5],
        [0, "x"],
        [-1, "x"],
        [float("nan"), "x"],
        "inf x",
        ["x", "x.bin"],
        [0.5, "x", 0.5, "./x"],
        [0.5, 0.5, "x", "y"],
    ],
)
def test_a_blend_that_makes_no_sense_is_an_error(
    write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: list[str | float]
) -> None:
    write_tokens("x", DOCUMENTS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="train_data_path"):
        opened(train_data_path=path)


def test_settings_that_contradict_each_other_are_errors(write_tokens: WriteTokens) -> None:
    prefix = str(write_tokens("x", DOCUMENTS))
    with pytest.raises(UsageError, match="both dataset and train_data_path"):
        opened(dataset="python-stdlib", train_data_path=prefix)
    with pytest.raises(UsageError, match="no data to train on"):
        opened()
    with pytest.raises(UsageError, match="needs a tokenizer"):
        opened(dataset="python-stdlib")
    for key in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        with pytest.raises(UsageError, match=f"{key}: the end-of-document token of the data is not known"):
            opened(train_data_path=prefix, **{key: True})
    with pytest.raises(UsageError, match="create_attention_mask_in_dataloader"):
        opened(train_data_path=prefix, create_attention_mask_in_dataloader=True)
    with pytest.raises(UsageError, match="fim_rate: the end-of-document token of the data is not known"):
        opened(train_data_path=prefix, fim_rate=0.5)
    with pytest.raises(UsageError, match="fim_rate: random tokens"):
        opened(mock_data=True, fim_rate=0.5)


@pytest.mark.parametrize("key", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_rate"])
def test_ends_of_documents_that_are_not_in_the_data_are_an_error(
    write_tokens: WriteTokens, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """As with files of another program and a tokenizer that is not theirs."""
    known: dict[str, Any] = {"tokenizer_model": str(tokenizer_file), "vocab_size": 1000, key: True}
    ended = str(write_tokens("ended", [[7] * 30 + [0]] * 100))
    without = str(write_tokens("without", [[7] * 31] * 100))
    end = {"fim_prefix_token": "a", "fim_middle_token": "b", "fim_suffix_token": "c"}
    assert opened(train_data_path=ended, **known, **end).eod_id == 0
    with pytest.raises(UsageError, match=f"{key}: token 0, the end of a document, does not occur in {without}"):
        opened(train_data_path=[ended, without], **known)
    monkeypatch.setattr(dataset, "LOOKED_AT", 4)
    monkeypatch.setattr(dataset, "LOOKED_AT_TOKENS", 10)
    last = str(write_tokens("last", [[7] * 3100 + [0]]))
    assert opened(train_data_path=last, split="1", **known, **end).eod_id == 0


def test_empty_documents_and_one_giant_make_samples_like_any_other(write_tokens: WriteTokens) -> None:
    documents = [[], [7] * 50_000, [], [], [8], []]
    data = opened(train_data_path=str(write_tokens("x", documents)), split="1")
    seen = [token for index in range(data.train.samples_per_epoch) for token in data.train[index].tolist()]
    assert set(seen) <= {7, 8} and data.train.samples_per_epoch == 3125
    with pytest.raises(UsageError, match="0 tokens in 592 documents are fewer than one sequence"):
        opened(train_data_path=str(write_tokens("empty", [[]] * 600 + [[1] * 9])), split="600,9")


def test_a_blend_tells_what_it_takes_from_each_file(write_tokens: WriteTokens) -> None:
    one, two = write_tokens("one", [[1] * 20] * 100), write_tokens("two", [[2] * 20] * 100)
    data = opened(train_data_path=[3, str(one), 1, str(two)], split="1")
    first, second = data.train.compute_progress(400)
    assert (first.prefix, first.samples, second.prefix, second.samples) == (one, 300, two, 100)
    assert first.epochs == 300 / 124
    sources = [piece.prefix for index in range(400) for piece in data.train.find_pieces(index)[:1]]
    assert sources.count(one) == 300


def test_many_files_together_keep_no_more_blocks_in_memory_than_one(write_tokens: WriteTokens) -> None:
    paths: list[str | float] = [str(write_tokens(str(number), DOCUMENTS)) for number in range(8)]
    data = opened(train_data_path=paths)
    assert isinstance(data.train, BlendedDataset)
    kept = [packed(part)._block.cache_parameters()["maxsize"] for part in data.train.datasets]
    assert kept == [CACHED_BLOCKS // 8] * 8


FIM_TOKENS = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]


def with_markers(tokenizer_file: Path, folder: Path) -> Path:
    """The tokenizer with the tokens of fill-in-the-middle."""
    described = json.loads(tokenizer_file.read_text())
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    described["added_tokens"] += [{"id": 300 + number, "content": FIM_TOKENS[number], **flags} for number in range(3)]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(described))
    return path


def test_filling_in_the_middle_needs_its_tokens_and_room_in_the_model(
    prepared: Prepare, tmp_path: Path, tokenizer_file: Path
) -> None:
    plain = str(prepared())
    with pytest.raises(UsageError, match=r"fim_prefix_token: .*no token '<fim_prefix>'") as caught:
        opened(train_data_path=plain, fim_rate=1.0)
    assert "fim_rate to 0" in caught.value.hint
    marked = str(prepared("marked", with_markers(tokenizer_file, tmp_path)))
    with pytest.raises(UsageError, match="vocab_size is 302"):
        opened(train_data_path=marked, fim_rate=1.0, vocab_size=302)
    data = opened(train_data_path=marked, fim_rate=1.0, vocab_size=303)
    unchanged = opened(train_data_path=marked, vocab_size=303)
    assert data.train[5].shape == unchanged.train[5].shape
    assert sum({300, 301, 302} <= set(data.train[index].tolist()) for index in range(50)) > 40
    assert data.train.find_pieces(5) == unchanged.train.find_pieces(5)
    assert data.fingerprint == unchanged.fingerprint


def test_mock_data_needs_nothing() -> None:
    data = opened(mock_data=True, vocab_size=50)
    assert data.train[0].shape == (17,)
    assert data.valid is not None
    assert not np.array_equal(data.train[0], data.valid[0])


def test_prepared_data_brings_its_tokenizer(prepared: Prepare, tokenizer: Tokenizer) -> None:
    data = opened(train_data_path=str(prepared()), vocab_size=300, eod_mask_loss=True)
    assert data.tokenizer_path
    assert Path(data.tokenizer_path).read_bytes() == tokenizer.content
    assert data.eod_id == 0


def test_a_tokenizer_larger_than_the_model_is_an_error(prepared: Prepare) -> None:
    with pytest.raises(UsageError, match="has ids up to 299, but the model's vocab_size is 299") as caught:
        opened(train_data_path=str(prepared()), vocab_size=299)
    assert "300 or more" in caught.value.hint


def test_a_tokenizer_that_is_not_the_data_s_is_an_error(
    prepared: Prepare, tmp_path: Path, tokenizer_file: Path, prose: Callable[..., str]
) -> None:
    other = tmp_path / "other" / "tokenizer.json"
    other.parent.mkdir()
    other.write_bytes(train_byte_level_bpe([prose(1000, seed=9)], 280).content)
    prefix = str(prepared())
    assert opened(train_data_path=prefix, tokenizer_model=str(tokenizer_file.parent)).eod_id == 0
    with pytest.raises(UsageError, match=r"corpus_text_document was prepared with the tokenizer .*, which is not"):
        opened(train_data_path=prefix, tokenizer_model=str(other))
    with pytest.raises(UsageError, match=r"prepare both with one tokenizer|has the tokenizer"):
        opened(train_data_path=prefix, valid_data_path=str(prepared("valid", other)))


def test_data_without_a_manifest_is_checked_against_the_tokenizer_that_is_named(
    write_tokens: WriteTokens, tokenizer_file: Path
) -> None:
    prefix = str(write_tokens("x", DOCUMENTS))
    data = opened(train_data_path=prefix, tokenizer_model=str(tokenizer_file))
    assert (data.tokenizer_path, data.eod_id) == (str(tokenizer_file), 0)
    with pytest.raises(UsageError, match="ids up to 299"):
        opened(train_data_path=prefix, tokenizer_model=str(tokenizer_file), vocab_size=200)


@pytest.mark.parametrize("damage", ["bin", "idx", "manifest"])
def test_prepared_files_that_do_not_belong_together_are_an_error(prepared: Prepare, damage: str) -> None:
    prefix = prepared()
    path = {"bin": bin_path, "idx": idx_path, "manifest": manifests.manifest_path}[damage](prefix)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UsageError, match=r"truncated|damaged"):
        opened(train_data_path=str(prefix))
    other = prepared("other", seed=5)
    manifests.manifest_path(other).write_bytes(manifests.encode_manifest(changed_size(other)))
    with pytest.raises(UsageError, match=r"\.bin: has \d+ bytes instead of the 7 bytes in its manifest"):
        opened(train_data_path=str(other))


def changed_size(prefix: Path) -> manifests.TokenFileManifest:
    manifest = manifests.read_manifest(prefix)
    assert manifest
    return msgspec.structs.replace(manifest, bin=manifests.FileFacts(bytes=7))


def test_the_fingerprint_is_that_of_the_tokens_and_the_split(
    prepared: Prepare, write_tokens: WriteTokens, tmp_path: Path
) -> None:
    prefix = str(prepared())
    one = opened(train_data_path=prefix).fingerprint
    assert opened(train_data_path=prefix, seed=9).fingerprint == one
    assert opened(train_data_path=prefix, split="90,10,0").fingerprint != one
    assert opened(train_data_path=str(prepared("other", seed=1))).fingerprint != one
    plain = opened(train_data_path=str(write_tokens("x", DOCUMENTS))).fingerprint
    other = str(write_tokens("y", [*DOCUMENTS[:-1], [0] * 20]))
    assert opened(train_data_path=other).fingerprint != plain
    blends = [[one, prefix, two, other] for one, two in ((1, 1), (1, 2))] + [[1, other, 1, prefix]]
    assert len({opened(train_data_path=blend).fingerprint for blend in blends}) == 3


def test_a_step_is_the_same_on_any_number_of_ranks_and_after_a_restart(
    prepared: Prepare, tmp_path: Path, tokenizer_file: Path
) -> None:
    marked = with_markers(tokenizer_file, tmp_path)
    blend: list[str | float] = [0.7, str(prepared("one", marked)), 0.3, str(prepared("two", marked, seed=7))]

    def steps(world_size: int, consumed_samples: int, count: int) -> list[set[bytes]]:
        taken: list[set[bytes]] = [set() for _ in range(count)]
        for rank in range(world_size):
            data = opened(train_data_path=blend, fim_rate=0.5, vocab_size=303)
            with Batches(data.train, BatchShape(8, 2, rank, world_size), consumed_samples) as batches:
                for step in taken:
                    step.update(sample.tobytes() for micro in next(batches) for sample in micro)
        return taken

    whole = steps(1, 0, 6)
    assert all(len(step) == 8 for step in whole)
    assert steps(2, 0, 2) + steps(4, 16, 4) == whole


PLUGIN = '''"""A few texts."""
from pathlib import Path
from typing import Any

def documents():
    reads = Path(__file__).with_name("reads")
    reads.write_text(reads.read_text() + "x" if reads.exists() else "x")
    yield from (f"document {number} " * 9 for number in range(300))
'''


def test_a_named_dataset_is_prepared_on_first_use_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plugins" / "sources"
    folder.mkdir(parents=True)
    (folder / "few_texts.py").write_text(PLUGIN)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path / "plugins"))
    settings = {"dataset": "few-texts", "tokenizer_type": "ByteLevelBPE", "data_path": str(tmp_path / "data")}
    first = opened(vocab_size=290, **settings)
    assert "training a byte-level BPE on few-texts" in capfd.readouterr().err
    reads = (folder / "reads").read_text()
    again = opened(vocab_size=290, **settings)
    assert (folder / "reads").read_text() == reads
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.train[5], first.train[5])
    assert (tmp_path / "data" / "few-texts" / "bpe-290" / "few-texts_text_document.bin").exists()


def test_an_unknown_dataset_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        opened(dataset="python-stdlb", tokenizer_type="ByteLevelBPE", data_path=str(tmp_path))
    assert caught.value.hint == "did you mean 'python-stdlib'?"
    assert list(tmp_path.iterdir()) == []
