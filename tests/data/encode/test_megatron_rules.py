"""What Megatron-LM's preprocess_data.py makes of unusual documents (Encoder.encode and Encoder.split there)."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from primus.data import readers
from primus.data.encode import encode as encoding
from primus.data.encode import sentences
from primus.data.encode.encode import encode_batch
from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.megatron.indexed_dataset import IndexedTokens
from primus.data.megatron.manifest import EncodeRecipe, TokenFileManifest
from primus.data.readers import BadDocument, TextDocument
from primus.data.tokenizers.load import parse_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import UsageError

HAS_NLTK = importlib.util.find_spec("nltk") is not None


@pytest.fixture
def vanishing(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer whose normalizer leaves nothing of the letter q."""
    described = json.loads(tokenizer.content)
    described["normalizer"] = {"type": "Replace", "pattern": {"String": "q"}, "content": ""}
    return parse_tokenizer(json.dumps(described).encode(), "vanishing")


def encoded(
    tmp_path: Path, tokenizer: Tokenizer, texts: Sequence[Any], **recipe: Any
) -> tuple[TokenFileManifest, list[list[list[int]]]]:
    """The manifest, and the sequences of each document."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.content)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = prepare_token_files(
        EncodeJob(
            inputs=(str(tmp_path / "in.jsonl"),),
            tokenizer=str(tmp_path / "tokenizer.json"),
            output=tmp_path / "out",
            recipe=EncodeRecipe(**recipe),
        )
    )[0]
    tokens = IndexedTokens(made.prefix)
    borders = tokens.borders.tolist()
    pairs = pairwise(borders)
    return made.manifest, [[tokens[each].tolist() for each in range(*pair)] for pair in pairs]


@pytest.mark.parametrize("append_eod", [True, False])
def test_a_document_whose_text_yields_no_tokens_is_none(tmp_path: Path, vanishing: Tokenizer, append_eod: bool) -> None:
    manifest, found = encoded(tmp_path, vanishing, ["fox", "qqq", "q", "dogs"], append_eod=append_eod)
    end = [0] if append_eod else []
    assert found == [[vanishing.encode("fox") + end], [vanishing.encode("dogs") + end]]
    assert (manifest.documents, manifest.empty_documents) == (2, 2)


def test_a_list_of_texts_is_a_document_of_several_sequences(tmp_path: Path, vanishing: Tokenizer) -> None:
    texts = [["fox jumps", "over", ""], ["the"], [], ["", ""], ["qq", "dogs", "q", "qqq"], ["q", "q"], "plain"]
    manifest, found = encoded(tmp_path, vanishing, texts)
    one = vanishing.encode
    assert found == [
        [one("fox jumps"), [*one("over"), 0]],
        [[*one("the"), 0]],
        [[*one("dogs"), 0]],
        [[*one("plain"), 0]],
    ]
    assert manifest.empty_documents == 3


def test_the_end_of_a_list_stays_with_its_document_where_batches_end(
    tmp_path: Path, vanishing: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "BATCH_TEXTS", 2)
    _, found = encoded(tmp_path, vanishing, [["fox", "over", "q", "q", "q"], ["the", "q"]])
    assert found == [[vanishing.encode("fox"), [*vanishing.encode("over"), 0]], [[*vanishing.encode("the"), 0]]]


@pytest.mark.parametrize("value", [["a", 1], [["a"]], {"a": "b"}, ["half \ud800"], [None]])
def test_a_list_of_anything_else_is_a_bad_document(tmp_path: Path, value: object) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": value}) + "\n" + json.dumps({"text": ["a"]}) + "\n")
    first, second = readers.read_documents(path, options=readers.ReadOptions(lists=True))
    assert isinstance(first, BadDocument)
    assert second == TextDocument("a")
    assert all(isinstance(item, BadDocument) for item in readers.read_documents(path))


def test_an_end_that_a_text_spells_out_at_its_end_is_not_the_end_of_its_document(tokenizer: Tokenizer) -> None:
    described = json.loads(tokenizer.content)
    ending, beginning = (
        parse_tokenizer(json.dumps(described | {"post_processor": _template(pattern)}).encode(), pattern[0], None, True)
        for pattern in (["A", "E"], ["E", "A"])
    )
    recipe = EncodeRecipe(parse_special_tokens=True, add_special_tokens=True)
    text = [TextDocument("fox <|endoftext|>")]
    plain = ending.encode("fox <|endoftext|>")
    assert plain[-1] == 0
    assert encode_batch(text, ending, recipe).tokens.tolist() == [*plain, 0]
    assert encode_batch(text, beginning, recipe).tokens.tolist() == [0, *plain, 0]
    without_template = EncodeRecipe(parse_special_tokens=True)
    assert encode_batch(text, ending, without_template).tokens.tolist() == [*plain, 0]


def _template(order: list[str]) -> dict[str, Any]:
    """A template with the end of document (E) before or after the text (A)."""
    pieces = {"A": {"Sequence": {"id": "A", "type_id": 0}}, "E": {"SpecialToken": {"id": "E", "type_id": 0}}}
    return {
        "type": "TemplateProcessing",
        "single": [pieces[each] for each in order],
        "pair": [pieces["A"], {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"E": {"id": "E", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }


@pytest.mark.skipif(HAS_NLTK, reason="nltk is installed")
def test_sentences_without_nltk_are_refused_with_the_package(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="--split-sentences needs the package nltk"):
        encoded(tmp_path, tokenizer, ["One. Two."], split_sentences="english")
    assert not (tmp_path / "out_text_sentence.bin").exists()


def test_each_sentence_is_a_sequence(tmp_path: Path, vanishing: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Splitter:
        """Divides as Punkt does where no abbreviation is in the way."""

        def tokenize(self, text: str) -> list[str]:
            return re.findall(r"\S[^.]*\.?", text)

    monkeypatch.setattr(sentences, "load_splitter", lambda language, keep_newlines: Splitter())
    manifest, found = encoded(
        tmp_path, vanishing, ["One fox. Two dogs.", "qq. q", "the", ["A. B.", "C."]], split_sentences="english"
    )
    one = vanishing.encode
    assert found == [
        [one("One fox."), [*one("Two dogs."), 0]],
        [[*one("."), 0]],
        [[*one("the"), 0]],
        [one("A."), one("B."), [*one("C."), 0]],
    ]
    assert (tmp_path / "out_text_sentence.idx").exists()
    assert manifest.recipe.split_sentences == "english"


@pytest.mark.skipif(not HAS_NLTK, reason="nltk is not installed")
def test_a_language_without_a_model_is_refused_with_how_to_get_it() -> None:
    with pytest.raises(UsageError, match="--lang klingon: nltk has no Punkt model") as caught:
        sentences.load_splitter("klingon", False)
    assert "punkt_tab" in caught.value.hint


def test_long_texts_are_divided_a_million_characters_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Splitter:
        def tokenize(self, text: str) -> list[str]:
            return [text]

    monkeypatch.setattr(sentences, "load_splitter", lambda language, keep_newlines: Splitter())
    found = sentences.split_sentences("a" * 2_500_000, "english", False)
    assert [len(part) for part in found] == [1_000_000, 1_000_000, 500_000]
