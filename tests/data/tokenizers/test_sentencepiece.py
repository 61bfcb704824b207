from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import pytest

from fakes import small_tokenizers as small
from primus.data.tokenizers.load import load_tokenizer
from primus.errors import PrimusError, UsageError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(small.sentencepiece_model())
    return path


def test_a_model_is_loaded_from_its_file_or_folder(model: Path) -> None:
    found = load_tokenizer(model)
    assert (found.eod, found.eod_id, found.bos_id, found.file_suffix) == ("</s>", 2, 1, ".model")
    assert found.special_strings == ("<s>", "</s>")
    assert (
        found.fingerprint == hashlib.sha256(model.read_bytes()).hexdigest() == load_tokenizer(model.parent).fingerprint
    )
    text = "The quick  fox\n\u65e5\u672c"
    assert found.decode(found.encode(text)) == text
    assert found.eod_id not in found.encode("a</s>b")
    assert found.encode_batch(["fox"], add_special_tokens=True)[0].tolist() == [1, *found.encode("fox")]
    again = pickle.loads(pickle.dumps(found))
    assert again.encode(text) == found.encode(text)


def test_another_end_of_document_can_be_named(model: Path) -> None:
    assert load_tokenizer(model, eod="<s>").eod_id == 1
    with pytest.raises(UsageError, match="no token '<eos>'"):
        load_tokenizer(model, eod="<eos>")


def test_special_tokens_cannot_be_parsed(model: Path) -> None:
    with pytest.raises(UsageError, match="plain text"):
        load_tokenizer(model, parse_special_tokens=True)


@pytest.mark.parametrize("content", [b"", b"\x00\x01garbage", b"some text that is no model"])
def test_a_damaged_model_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.model"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a SentencePiece model"):
        load_tokenizer(path)


def test_a_lone_surrogate_is_an_error_that_says_where(model: Path) -> None:
    for tokenizer in (load_tokenizer(model), load_tokenizer(model, fast=False), small.by_pattern()["gpt2"]):
        with pytest.raises(PrimusError, match=r"text 1 of a batch has the lone surrogate U\+D800 at character 2"):
            tokenizer.encode_batch(["fine", "ab\ud800c"])
