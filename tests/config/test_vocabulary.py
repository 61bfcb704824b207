"""The size of a vocabulary is read from a tokenizer's files, as its library would count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.config.vocabulary import find_data_tokenizer, find_tokenizer_size, find_vocabulary_size


@pytest.mark.parametrize(
    ("content", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}, 2),
        ({"model": {"vocab": {"a": 0, "b": 9}}}, 10),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 2, "content": "x"}]}, 3),
        ({"model": {"vocab": {}}, "added_tokens": [{"id": 7, "content": "x"}]}, 8),
        ({"model": {}}, None),
        ({}, None),
        ([], None),
    ],
)
def test_the_size_is_the_largest_id_and_one(tmp_path: Path, content: object, size: int | None) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert find_tokenizer_size(str(tmp_path / "tokenizer.json")) == size
    assert find_tokenizer_size(str(tmp_path)) == size


@pytest.mark.parametrize(
    ("content", "size"), [('{"a": 0, "b": 4}', 5), ('{"a": 0}', 1), ("{}", None), ('["a"]', None), ("", None)]
)
def test_the_size_of_a_vocabulary_alone_is_its_largest_id_and_one(
    tmp_path: Path, content: str, size: int | None
) -> None:
    (tmp_path / "vocab.json").write_text(content)
    assert find_vocabulary_size(str(tmp_path / "vocab.json")) == size
    assert find_vocabulary_size(str(tmp_path / "none.json")) is None


def piece(text: bytes) -> bytes:
    return bytes([0x0A, len(text) + 2, 0x0A, len(text)]) + text


def test_the_pieces_of_a_sentencepiece_model_are_counted(tmp_path: Path) -> None:
    trainer_spec, version = b"\x12\x03abc", b"\x18\x96\x01"
    (tmp_path / "t.model").write_bytes(piece(b"a") + trainer_spec + version + piece(b"bc") + piece(b"d"))
    assert find_tokenizer_size(str(tmp_path / "t.model")) == 3
    assert find_tokenizer_size(str(tmp_path)) == 3


@pytest.mark.parametrize("name", ["gpt2", "none/tokenizer.json", "tiktoken:x", "a\0b", "owner/name"])
def test_a_tokenizer_that_is_not_here_has_no_known_size(name: str) -> None:
    assert find_tokenizer_size(name) is None


@given(st.binary(max_size=40), st.sampled_from(["x.json", "x.model", "d.manifest.json"]))
def test_damaged_files_have_no_size_and_end_no_command(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    file = tmp_path_factory.getbasetemp() / name
    file.write_bytes(content)
    assert (find_tokenizer_size(str(file)) or 1) >= 1
    assert find_data_tokenizer(file.with_name("d")) is None
