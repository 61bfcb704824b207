from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from fakes import small_tokenizers as small
from primus.data.tokenizers.load import parse_tokenizer
from primus.data.tokenizers.tokenizer_json import TokenizerJson


def test_an_outline_is_the_file_wherever_its_parts_stand() -> None:
    described = json.loads(small.by_pattern()["qwen2"].content)
    misleading = {**described, "model": {"added_tokens": [], **described["model"]}}
    for parts in (described, dict(reversed(misleading.items()))):
        outline = TokenizerJson.decode_outline(json.dumps(parts, indent=1).encode())
        assert isinstance(outline.model["vocab"], msgspec.Raw)
        assert json.loads(outline.encode()) == parts
        assert json.loads(outline.encode(added_tokens=[])) == {**parts, "added_tokens": []}


@pytest.mark.parametrize("content", [b'{"model": ', b'{"model": []}', b"[]", b"\xff"])
def test_what_is_no_such_json_has_no_outline(content: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        TokenizerJson.decode_outline(content)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "cl100k"])
def test_the_vocabulary_is_the_one_that_the_library_has(name: str) -> None:
    content = small.by_pattern()[name].content
    expected = Backend.from_str(content.decode()).get_vocab(with_added_tokens=True)
    assert TokenizerJson.decode(content).collect_vocabulary() == expected


@pytest.mark.parametrize(
    "model",
    [
        models.Unigram([("a", -1.0), ("b", -2.5), ("<unk>", 0.0)], unk_id=2),
        models.WordLevel({"a": 0, "<unk>": 3}, unk_token="<unk>"),
        models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}),
    ],
)
def test_the_vocabulary_of_other_models_is_the_one_that_the_library_has(model: Any) -> None:
    backend = Backend(model)
    backend.add_special_tokens(["<eos>"])
    content = backend.to_str().encode()
    expected = backend.get_vocab(with_added_tokens=True)
    assert TokenizerJson.decode(content).collect_vocabulary() == expected
    loaded = parse_tokenizer(content, "other")
    assert (loaded.eod_id, loaded.vocab_size) == (expected["<eos>"], max(expected.values()) + 1)


def test_joined_merges_are_the_same_merges_to_the_library() -> None:
    described = json.loads(small.by_pattern()["gpt2"].content)
    joined = TokenizerJson(described).join_merges()
    assert isinstance(joined.model["merges"][0], str)
    assert joined.join_merges() is joined
    backend = Backend.from_str(joined.encode().decode())
    assert json.loads(backend.to_str())["model"]["merges"] == described["model"]["merges"]


def test_merges_of_tokens_with_a_space_stay_pairs() -> None:
    vocabulary = {"a": 0, " ": 1, "b": 2, "a ": 3, "ab": 4}
    described = TokenizerJson({"model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"], ["a", " "]]}})
    assert described.join_merges() is described
    loaded = parse_tokenizer(described.encode(), "spaces")
    assert loaded.encode("a ") == [3]


def test_the_identity_stays_the_one_under_which_data_was_prepared() -> None:
    content = small.by_pattern()["gpt2"].content
    described = json.loads(content)
    described["model"]["vocab"] = {"b": 1, "a": 0, "ab": 2, "<|endoftext|>": 3}
    described["model"]["merges"] = [["a", "b"]]
    described["added_tokens"] = [{**described["added_tokens"][0], "id": 3}]
    expected = "9d762022356dc91e74b1d8761e96086f6f28bb93bdb748b13a6e3437034c938e"
    decoded = TokenizerJson(described)
    assert decoded.compute_fingerprint() == decoded.join_merges().compute_fingerprint() == expected
    assert parse_tokenizer(json.dumps(described).encode(), "made up").fingerprint == expected
