from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import small_tokenizers as small
from primus.data.tokenizers.cuts import PATTERNS
from primus.data.tokenizers.load import parse_tokenizer


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=200, deadline=None)
@given(text=small.texts, size=st.integers(0, 12))
def test_the_pieces_have_the_ids_of_the_whole(name: str, text: str, size: int) -> None:
    tokenizer = small.by_pattern()[name]
    pieces = tokenizer.cut_safely(text, size)
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)
    assert all(len(piece) >= size for piece in pieces[:-1])


@pytest.mark.parametrize("name", PATTERNS)
def test_no_cut_is_between_two_characters_that_may_be_one_token(name: str) -> None:
    tokenizer = small.by_pattern()[name]
    for first in small.FRAGMENTS:
        text = "".join(first + second for second in small.FRAGMENTS)
        pieces = tokenizer.cut_safely(text, 1)
        assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.mark.parametrize("name", PATTERNS)
def test_prose_and_code_and_lines_without_spaces_are_cut(name: str) -> None:
    for text in ("Some words, and more. ", "    if x:\n        pass\n", "\u65e5\u672c\u8a9e\n"):
        pieces = small.by_pattern()[name].cut_safely(text * 500, 100)
        assert max(map(len, pieces)) < 200


PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
ADDED: dict[str, Any] = {"id": 0, "content": "<|endoftext|>", "special": True, **PLAIN}


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"added_tokens": [{**ADDED, "rstrip": True}]},
    ],
)
def test_a_tokenizer_that_may_look_beyond_a_border_leaves_the_text_whole(parts: dict[str, Any]) -> None:
    tokenizer = small.changed(small.by_pattern()["gpt2"], **parts)
    assert tokenizer.cut_safely("a b c", 1) == ["a b c"]


def test_an_added_token_with_a_space_leaves_the_text_whole() -> None:
    tokenizer = small.by_pattern()["gpt2"]
    token = {**ADDED, "id": tokenizer.vocab_size, "content": "a b", "special": False}
    assert small.changed(tokenizer, added_tokens=[ADDED, token]).cut_safely("a b c", 1) == ["a b c"]


def test_a_sentencepiece_model_leaves_the_text_whole() -> None:
    assert parse_tokenizer(small.sentencepiece_model(), "small.model").cut_safely("a b c", 1) == ["a b c"]
