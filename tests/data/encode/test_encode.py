from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data.encode import encode
from primus.data.encode.encode import EncodeFacts, EncodeStage, encode_batch
from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.megatron.manifest import EncodeRecipe
from primus.data.readers import TextDocument
from primus.data.readers import shard as shards
from primus.data.shards import inputs
from primus.data.shards.shard_queue import open_shard_queue
from primus.data.tokenizers.document_ends import END_OF_TEXT
from primus.data.tokenizers.load import parse_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import PrimusError

Prose = Callable[..., str]
PLAIN = EncodeRecipe(append_eod=False)

texts = st.lists(
    st.builds(
        TextDocument, st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.booleans(), st.booleans()
    )
)


@settings(max_examples=100, deadline=None)
@given(texts=texts, append_eod=st.booleans())
def test_a_batch_is_its_texts_one_after_the_other(
    tokenizer: Tokenizer, texts: list[TextDocument], append_eod: bool
) -> None:
    texts = [text for text in texts if text.text or (text.begins and text.ends)]  # see test_megatron_rules.py
    encoded = encode_batch(texts, tokenizer, EncodeRecipe(append_eod=append_eod))
    kept = [text for text in texts if text.text or not (text.begins and text.ends)]
    expected = [[*tokenizer.encode(text.text), *([0] if append_eod and text.ends else [])] for text in kept]
    assert encoded.tokens.tolist() == [token for sequence in expected for token in sequence]
    assert encoded.lengths.tolist() == [len(sequence) for sequence in expected]
    assert encoded.ends_document.tolist() == [text.ends for text in kept]
    assert (encoded.characters, encoded.empty) == (sum(len(text.text) for text in texts), len(texts) - len(kept))


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer whose template puts the end of text around each text."""
    described = json.loads(tokenizer.content)
    special = {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}, special],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}},
    }
    return parse_tokenizer(json.dumps(described).encode(), "template")


def test_an_end_that_the_template_has_added_is_not_added_twice(tokenizer: Tokenizer) -> None:
    recipe = EncodeRecipe(add_special_tokens=True)
    encoded = encode_batch([TextDocument("fox"), TextDocument("dogs")], with_template(tokenizer), recipe)
    assert encoded.tokens.tolist() == [0, *tokenizer.encode("fox"), 0, 0, *tokenizer.encode("dogs"), 0]
    assert encode_batch([TextDocument("fox")], tokenizer, recipe).tokens.tolist() == [*tokenizer.encode("fox"), 0]


def test_a_long_document_is_one_sequence_of_the_same_tokens(
    tokenizer: Tokenizer, prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prose(5000)
    expected = encode_batch([TextDocument(text)], tokenizer, EncodeRecipe())
    pieces: list[int] = []
    whole = Tokenizer.cut_safely

    def cut_safely(self: Tokenizer, text: str, size: int) -> list[str]:
        cut = whole(self, text, size)
        pieces.append(len(cut))
        return cut

    monkeypatch.setattr(encode, "LONG_CHARACTERS", 1000)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(Tokenizer, "cut_safely", cut_safely)
    encoded = encode_batch([TextDocument(text)], tokenizer, EncodeRecipe())
    assert pieces[0] > 20
    assert encoded.lengths.tolist() == expected.lengths.tolist()
    assert encoded.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("shard_bytes", [500, 3000, 1 << 20])
def test_tokens_do_not_depend_on_how_the_input_is_divided(
    tmp_path: Path, tokenizer: Tokenizer, prose: Prose, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [prose(seed % 40, seed) for seed in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    monkeypatch.setattr(encode, "BATCH_TEXTS", 7)
    monkeypatch.setattr(shards, "SMALLEST_SHARD_BYTES", shard_bytes)
    text = inputs.open_files([str(tmp_path / "a.jsonl")])
    stage = EncodeStage(tokenizer, EncodeRecipe(), text.fingerprints)
    queue = open_shard_queue(stage, text.shards, tmp_path / "work")
    rows = [row for shard in text.shards if (row := queue.process_shard(shard))]
    expected = encode_batch([TextDocument(value) for value in values], tokenizer, EncodeRecipe())
    for suffix, array in (("bin", expected.tokens), ("lengths", expected.lengths), ("ends", expected.ends_document)):
        assert b"".join(queue.result_file(row, suffix).read_bytes() for row in rows) == array.tobytes()
    assert sum(row.counts["documents"] for row in rows) == len(values) - values.count("")
    assert text.collect_facts([row.read_facts(EncodeFacts).contents for row in rows]) == text.collect_facts(
        [inputs.hash_contents(shard) for shard in text.shards]
    )


def test_a_special_token_that_a_text_spells_out_is_counted(tokenizer: Tokenizer) -> None:
    encoded = encode_batch([TextDocument(f"a {END_OF_TEXT} b{END_OF_TEXT}"), TextDocument("c")], tokenizer, PLAIN)
    assert encoded.special_strings == 2
    assert 0 not in encoded.tokens.tolist()


def test_a_change_of_a_file_is_told_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fox"}\n' * 90_000)
    before = inputs.open_files([str(file)])
    facts = before.collect_facts([inputs.hash_contents(shard) for shard in before.shards])
    os.utime(file, ns=(1, 1))
    touched = inputs.open_files([str(file)])
    assert not touched.describe_difference(facts)
    with pytest.raises(PrimusError, match="changed while it was read"):
        before.check_unchanged()
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert inputs.open_files([str(file)]).describe_difference(facts) == f"{file} is new, gone or changed"


BUILDER = """
import json, sys
import numpy, tokenizers
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

for tokenizer, prefix, size, eod in zip(*[iter(sys.argv[2:])] * 4):
    encoder = tokenizers.Tokenizer.from_file(tokenizer)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(int(size)))
    for line in open(sys.argv[1]):
        ids = encoder.encode(json.loads(line)["text"]).ids + [int(eod)]
        builder.add_document(ids, [len(ids)])
    builder.finalize(prefix + ".idx")
    ours = IndexedDataset(prefix.replace("theirs", "ours") + "_text_document")
    print(json.dumps([ours[index].tolist() for index in range(len(ours))]))
"""


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_files_equal_those_of_megatrons_own_builder(tmp_path: Path, tokenizer: Tokenizer, prose: Prose) -> None:
    values = [prose(1 + seed % 90, seed) + "\u00e9\u65e5\n" for seed in range(300)]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    described = json.loads(tokenizer.content)
    (tmp_path / "uint16.json").write_text(json.dumps(described))
    described["model"]["vocab"]["<far>"] = 70_000
    (tmp_path / "int32.json").write_text(json.dumps(described))
    words: list[object] = []
    for dtype in ("uint16", "int32"):
        job = EncodeJob(
            inputs=(str(lines),), tokenizer=str(tmp_path / f"{dtype}.json"), output=tmp_path / f"ours-{dtype}"
        )
        manifest = prepare_token_files(job)[0].manifest
        assert manifest.dtype == dtype
        words += [job.tokenizer, tmp_path / f"theirs-{dtype}", manifest.tokenizer.vocab_size, 0]
    command = [sys.executable, "-c", BUILDER, str(lines), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    for dtype, read in zip(("uint16", "int32"), done.stdout.splitlines()[-2:], strict=True):
        assert json.loads(read) == [[*tokenizer.encode(value), 0] for value in values]
        for end in ("bin", "idx"):
            ours, theirs = tmp_path / f"ours-{dtype}_text_document.{end}", tmp_path / f"theirs-{dtype}.{end}"
            assert ours.read_bytes() == theirs.read_bytes()
