from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fakes import small_tokenizers as small
from primus.data.encode.encode import encode_batch
from primus.data.megatron.manifest import EncodeRecipe
from primus.data.readers import TextDocument
from primus.data.readers.shard import FilePart
from primus.data.tokenizers.canary import FIRST, LONGEST, ONE_IN, Canary, check_samples
from primus.data.tokenizers.load import parse_tokenizer
from primus.data.tokenizers.tokenizer import Batch, Tokenizer
from primus.errors import PrimusError


class Wrong:
    """An engine that is wrong where a text has a word."""

    failure = ""

    def __init__(self, right: Tokenizer, word: str) -> None:
        self.right = right
        self.word = word

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        return self.right.exact.encode_batch([text.replace(self.word, "???") for text in texts], add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self.right.decode(ids)


@pytest.fixture
def right() -> Tokenizer:
    return small.by_pattern()["gpt2"]


def run(tokenizer: Tokenizer, documents: Sequence[str], batch_size: int = 50) -> int:
    canary = Canary(tokenizer)
    num_checked = 0
    for start in range(0, len(documents), batch_size):
        texts = documents[start : start + batch_size]
        samples = canary.sample_batch(
            texts, *tokenizer.encode_batch(texts), lambda place, start=start: f"d.jsonl:{start + place}"
        )
        num_checked += check_samples(tokenizer, samples)
    return num_checked


def test_a_difference_names_the_document_and_says_how_to_go_on(right: Tokenizer) -> None:
    wrong = replace(right, fast=Wrong(right, "quick"))
    with pytest.raises(PrimusError, match=r"d\.jsonl:2: the fast tokenizer gives \[.*\] at token \d+ where") as caught:
        run(wrong, ["first", "second", "the quick fox", "more"])
    assert "--no-fast" in caught.value.hint


def test_a_missing_end_is_a_difference(right: Tokenizer) -> None:
    samples = Canary(right).sample_batch(["some text"], *right.encode_batch(["some text"]))
    cut = [replace(sample, tokens=sample.tokens[:-1]) for sample in samples]
    with pytest.raises(PrimusError, match="text 0"):
        check_samples(right, cut)


def test_the_first_documents_and_about_one_in_a_thousand_are_checked(right: Tokenizer) -> None:
    documents = [f"document {number}" for number in range(8_000)]
    found = run(right, documents)
    assert FIRST + 2 < found < FIRST + 20
    assert found == run(right, documents, batch_size=7)
    assert run(right, documents[: FIRST - 1]) == FIRST - 1


def test_a_fault_in_one_document_of_ten_is_found(right: Tokenizer) -> None:
    documents = ["quick" if number % 10 == 9 else "" for number in range(30 * ONE_IN)]
    documents = [f"{number} {word}" for number, word in enumerate(documents)]
    wrong = replace(right, fast=Wrong(right, "quick"))
    with pytest.raises(PrimusError):
        run(wrong, documents, batch_size=1000)


def test_of_a_long_document_the_beginning_is_checked(right: Tokenizer) -> None:
    text = "the fox jumps " * LONGEST
    canary = Canary(right)
    (sample,) = canary.sample_batch([text], *right.encode_batch([text]))
    assert len(sample.text) < 2 * LONGEST
    assert check_samples(right, [sample]) == 1
    tokens = np.array(sample.tokens)
    tokens[3] += 1
    with pytest.raises(PrimusError, match="at token 3"):
        check_samples(right, [replace(sample, tokens=tokens)])


def test_without_the_fast_way_there_is_nothing_to_check(right: Tokenizer) -> None:
    assert run(parse_tokenizer(right.content, "slow", fast=False), ["some text"]) == 0


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_a_shard_is_checked_while_it_is_encoded(right: Tokenizer, add_special_tokens: bool) -> None:
    recipe = EncodeRecipe(add_special_tokens=add_special_tokens)
    texts = [TextDocument("the fox"), TextDocument("the quick fox", part=FilePart("d.jsonl", 0, 10), number=2)]
    canary = Canary(right, add_special_tokens)
    encode_batch(texts, right, recipe, canary)
    assert canary.num_seen == 2
    wrong = replace(right, fast=Wrong(right, "quick"))
    with pytest.raises(PrimusError, match=r"d\.jsonl.*: the fast tokenizer gives"):
        encode_batch(texts, wrong, recipe, Canary(wrong, add_special_tokens))
