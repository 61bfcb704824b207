from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from fakes import small_tokenizers as small
from primus.data.tokenizers import fast
from primus.data.tokenizers.cuts import PATTERNS
from primus.data.tokenizers.document_ends import END_OF_TEXT
from primus.data.tokenizers.load import parse_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer

batches = st.lists(small.texts, max_size=4)


def assert_same(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = False) -> None:
    assert tokenizer.fast is not None
    found, expected = (engine.encode_batch(texts, add_special_tokens) for engine in (tokenizer.fast, tokenizer.exact))
    for text, here, there in zip(texts, rows(found), rows(expected), strict=True):
        assert here == there, (text, here, there)


def rows(batch: Any) -> list[list[int]]:
    tokens, lengths = batch
    assert int(lengths.sum()) == len(tokens)
    return [row.tolist() for row in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else []


@pytest.mark.parametrize("name", [*PATTERNS, "deepseek"])
@settings(max_examples=100, deadline=None)
@given(texts=batches)
def test_the_fast_ids_are_those_of_the_library(name: str, texts: list[str]) -> None:
    assert_same(small.by_pattern()[name], texts)


@settings(max_examples=100, deadline=None)
@given(texts=batches)
def test_the_fast_ids_of_a_sentencepiece_model_are_those_of_the_library(texts: list[str]) -> None:
    assert_same(small_sentencepiece(), texts)


@functools.cache
def small_sentencepiece() -> Tokenizer:
    return parse_tokenizer(small.sentencepiece_model(), "small.model")


@pytest.mark.parametrize("name", list(PATTERNS))
def test_a_letter_that_only_one_of_the_two_knows_is_left_to_the_library(name: str) -> None:
    borders = [chr(border) for borders in fast.NEWER for border in borders]
    assert_same(small.by_pattern()[name], [f"a{letter}'s {letter}1{letter} \U0001f469" for letter in borders])


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_text_cannot_forge_a_special_token_the_fast_way(name: str) -> None:
    tokenizer = small.by_pattern()[name]
    text = f"a{END_OF_TEXT}b<think>c"
    assert_same(tokenizer, [text, "plain", text])
    assert tokenizer.eod_id not in tokenizer.encode_batch([text])[0]


@settings(max_examples=100, deadline=None)
@given(texts=batches)
def test_special_tokens_are_parsed_where_that_is_asked_for(texts: list[str]) -> None:
    tokenizer = small.by_pattern()["qwen2"]
    parsing = parse_tokenizer(tokenizer.content, "parsing", END_OF_TEXT, parse_special_tokens=True)
    assert_same(parsing, [*texts, END_OF_TEXT])
    assert parsing.eod_id in parsing.encode_batch([f"a{END_OF_TEXT}b"])[0]


@settings(max_examples=50, deadline=None)
@given(texts=batches)
@pytest.mark.parametrize("single", ["<|endoftext|> $A", "$A <|endoftext|>", "<|endoftext|> $A <|endoftext|>", "$A"])
def test_the_template_is_put_around_each_text(single: str, texts: list[str]) -> None:
    assert_same(with_template(single), texts, add_special_tokens=True)


@functools.cache
def with_template(single: str) -> Tokenizer:
    template = processors.TemplateProcessing(single=single, special_tokens=[(END_OF_TEXT, 0)])
    described = json.loads(template.__getstate__())
    return small.changed(small.by_pattern()["gpt2"], post_processor=described)


def test_a_tokenizer_goes_to_another_process_without_its_libraries() -> None:
    tokenizer = small.by_pattern()["cl100k"]
    program = (
        "import pickle, sys\n"
        "tokenizer = pickle.load(sys.stdin.buffer)\n"
        "assert not {'tokenizers', 'gigatoken'} & set(sys.modules)\n"
        "print(tokenizer.encode_batch(['some text'])[0].tolist(), {'tokenizers', 'awkward'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(tokenizer), capture_output=True, timeout=60
    )
    assert done.stdout.decode().strip() == f"{tokenizer.encode('some text')} set()", done.stderr.decode()


def unknown(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": unknown(r"\s+|\S+")},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
    ],
)
def test_what_the_fast_way_does_not_know_is_left_to_the_library(parts: dict[str, Any]) -> None:
    tokenizer = small.changed(small.by_pattern()["gpt2"], **parts)
    assert tokenizer.fast is None
    tokens, lengths = tokenizer.encode_batch(["Some text", "", "more"])
    assert rows((tokens, lengths)) == [tokenizer.encode("Some text"), [], tokenizer.encode("more")]


@pytest.mark.parametrize("options", [{"kind": "unigram"}, {"byte_fallback": False}, {"own": "::"}])
def test_a_sentencepiece_model_of_another_kind_is_left_to_the_library(options: dict[str, Any]) -> None:
    assert parse_tokenizer(small.sentencepiece_model(**options), "small.model").fast is None


def test_the_fast_way_can_be_switched_off() -> None:
    assert parse_tokenizer(small.by_pattern()["gpt2"].content, "slow", fast=False).fast is None


class PanicException(BaseException):
    """As pyo3 names a panic of Rust."""


@pytest.mark.parametrize("error", [RuntimeError, PanicException])
def test_a_batch_on_which_gigatoken_fails_is_left_to_the_library(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = pickle.loads(pickle.dumps(small.by_pattern()["gpt2"]))

    def fail(*_: object) -> None:
        raise error("no")

    tokenizer.encode_batch(["loaded"])
    assert tokenizer.fast.failure == ""
    monkeypatch.setattr(tokenizer.fast, "_encode_texts", fail)
    assert_same(tokenizer, ["some text"])
    assert tokenizer.fast.failure == f"{error.__name__}: no"


def test_an_interrupt_is_no_failure_of_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = pickle.loads(pickle.dumps(small.by_pattern()["gpt2"]))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer.fast, "_encode_texts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode_batch(["some text"])


def test_an_engine_that_differs_on_a_probe_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    content = small.by_pattern()["gpt2"].content
    right = fast.GigatokenEngine._encode_texts

    def wrong(self: fast.GigatokenEngine, texts: Sequence[str]) -> Any:
        tokens, lengths = right(self, texts)
        return np.where(np.arange(len(tokens)) == 7, tokens + 1, tokens), lengths

    monkeypatch.setattr(fast.GigatokenEngine, "_encode_texts", wrong)
    assert parse_tokenizer(content, "wrong").fast is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell the memory")
def test_new_words_without_end_do_not_fill_the_memory() -> None:
    program = (
        "import pickle, random, sys\n"
        "from primus.data.tokenizers import fast\n"
        "tokenizer = pickle.load(sys.stdin.buffer)\n"
        "draw, letters = random.Random(0), str.maketrans('0123456789', 'ghijklmnop')\n"
        "tokenizer.encode_batch(['loaded'])\n"
        "before, most = fast._read_resident_bytes(), 0\n"
        "for _ in range(20):\n"
        "    words = ' '.join(draw.randbytes(7).hex().translate(letters) for _ in range(120_000))\n"
        "    tokenizer.encode_batch([words])\n"
        "    most = max(most, fast._read_resident_bytes() - before)\n"
        "print(most >> 20)\n"
    )
    content = pickle.dumps(small.by_pattern()["gpt2"])
    done = subprocess.run([sys.executable, "-c", program], input=content, capture_output=True, timeout=120, check=True)
    assert int(done.stdout) < 170
