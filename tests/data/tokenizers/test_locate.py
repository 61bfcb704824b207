from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes import small_tokenizers as small
from primus.data.tokenizers.load import check_tokenizer_type, load_tokenizer, parse_tokenizer
from primus.data.tokenizers.locate import is_local
from primus.errors import UsageError


def test_gpt2s_pair_of_files_has_the_ids_of_its_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = small.by_pattern()["gpt2"]
    model = json.loads(tokenizer.content)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    for name in (str(tmp_path), f"{tmp_path / 'vocab.json'},{tmp_path / 'merges.txt'}"):
        found = load_tokenizer(name)
        assert (found.eod, found.eod_id, found.vocab_size) == (tokenizer.eod, tokenizer.eod_id, tokenizer.vocab_size)
        assert [found.encode(text) for text in small.FRAGMENTS] == [tokenizer.encode(text) for text in small.FRAGMENTS]
    with pytest.raises(UsageError, match=r"nothing\.txt: no such file"):
        load_tokenizer(f"{tmp_path / 'vocab.json'},{tmp_path / 'nothing.txt'}")
    (tmp_path / "merges.txt").write_text("a b c\n")
    with pytest.raises(UsageError, match="not GPT-2's pair of files"):
        load_tokenizer(tmp_path)


def test_a_folder_with_two_models_is_a_question(tmp_path: Path) -> None:
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(small.sentencepiece_model())
    with pytest.raises(UsageError, match=r"several tokenizers: a\.model, b\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["a.model", "a.tiktoken", "./a", "/nowhere/a", "a.json"])
def test_a_file_that_is_not_there_is_no_name_on_the_hub(name: str) -> None:
    with pytest.raises(UsageError, match="no such tokenizer"):
        load_tokenizer(name)


def test_a_token_that_the_library_would_number_anew_is_an_error(tmp_path: Path) -> None:
    described = json.loads(small.by_pattern()["gpt2"].content)
    token = described["added_tokens"][0]
    described["added_tokens"] = [token, {**token, "id": 1000, "content": "<|later|>"}]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    with pytest.raises(UsageError, match=r"gives <\|later\|> the id \d+, but the file says 1000"):
        load_tokenizer(path)
    described["model"]["vocab"]["<|later|>"] = 1000
    path.write_text(json.dumps(described))
    assert load_tokenizer(path).vocab_size == 1001


def test_a_tokenizer_of_another_type_than_the_settings_say_is_an_error() -> None:
    byte_level = small.by_pattern()["gpt2"]
    pieces = parse_tokenizer(small.sentencepiece_model(), "small.model")
    for tokenizer, kind in ((byte_level, "TikTokenizer"), (pieces, "Llama2Tokenizer"), (byte_level, "Llama2Tokenizer")):
        assert check_tokenizer_type(tokenizer, kind) is tokenizer
    with pytest.raises(UsageError, match=r"small\.model is not a HuggingFaceTokenizer") as caught:
        check_tokenizer_type(pieces, "HuggingFaceTokenizer")
    assert "SentencePieceTokenizer" in caught.value.hint
    with pytest.raises(UsageError, match="is not a GPTSentencePieceTokenizer"):
        check_tokenizer_type(byte_level, "GPTSentencePieceTokenizer")


def test_files_and_pairs_are_local_and_names_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.tiktoken"
    path.touch()
    assert all(map(is_local, (str(path), str(tmp_path), f"{path},{path}", f"tiktoken:cl100k:{path}")))
    assert not any(map(is_local, ("owner/name", "tiktoken:cl100k_base", "bpe:8192", f"tiktoken:cl100k:{path}x")))
