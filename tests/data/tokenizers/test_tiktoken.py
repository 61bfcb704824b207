from __future__ import annotations

import base64
import functools
import json
from pathlib import Path

import pytest
import tiktoken as library
from hypothesis import given, settings

from fakes import small_tokenizers as small
from primus.data.tokenizers import tiktoken
from primus.data.tokenizers.byte_level import LETTERS
from primus.data.tokenizers.load import load_tokenizer, parse_tokenizer
from primus.data.tokenizers.tiktoken import MEGATRON_SPECIAL, SCHEMES
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import PrimusError, UsageError


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The tokens of a byte-level BPE, the bytes in their order first, as tiktoken's files have them."""
    bytes_of = {letter: byte for byte, letter in LETTERS.items()}
    vocabulary = json.loads(tokenizer.content)["model"]["vocab"]
    learned = sorted((token for token in vocabulary if 1 < len(token) < 13), key=vocabulary.__getitem__)
    tokens = [bytes([byte]) for byte in range(256)] + [bytes(map(bytes_of.__getitem__, token)) for token in learned]
    return {token: rank for rank, token in enumerate(tokens)}


def lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return ranks_of(small.by_pattern()["cl100k"])


PUBLISHED_PATTERNS = {
    # tiktoken_ext/openai_public.py
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s",
    # llama_models/llama3/tokenizer.py
    "llama3": SCHEMES["llama3"].pattern,
    "o200k": SCHEMES["o200k"].pattern,
}


@functools.cache
def pair(scheme: str) -> tuple[Tokenizer, library.Encoding]:
    """A small vocabulary as ours and as tiktoken's."""
    ranks = ranks_of(small.by_pattern()["cl100k"])
    ours = parse_tokenizer(tiktoken.convert_ranks(lines(ranks), "small.tiktoken", scheme), scheme)
    pattern = PUBLISHED_PATTERNS[scheme]
    return ours, library.Encoding(scheme, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("scheme", PUBLISHED_PATTERNS)
@settings(max_examples=200, deadline=None)
@given(text=small.texts)
def test_the_ids_are_those_of_tiktoken(scheme: str, text: str) -> None:
    ours, encoding = pair(scheme)
    expected = encoding.encode_ordinary(text)
    assert ours.encode(text) == expected
    assert ours.encode_batch([text])[0].tolist() == expected


def test_a_file_of_another_vocabulary_needs_a_scheme(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(lines(ranks))
    with pytest.raises(UsageError, match="does not define how text is split") as caught:
        load_tokenizer(path)
    assert f"tiktoken:SCHEME:{path}" in caught.value.hint
    found = load_tokenizer(f"tiktoken:cl100k:{path}")
    assert (found.eod, found.eod_id, found.vocab_size) == ("<|endoftext|>", len(ranks), len(ranks) + 1)
    assert found.fast is not None
    named = path.rename(tmp_path / "cl100k_mine.tiktoken")
    assert load_tokenizer(named).fingerprint == found.fingerprint
    assert load_tokenizer(tmp_path).fingerprint == found.fingerprint


def test_what_is_asked_for_with_a_wrong_name_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tiktoken encoding 'cl10k_base'") as caught:
        load_tokenizer("tiktoken:cl10k_base")
    assert "cl100k_base" in caught.value.hint
    path = tmp_path / "a.tiktoken"
    path.write_bytes(b"IQ== 0\n")
    with pytest.raises(UsageError, match="no tiktoken scheme 'cl100'"):
        load_tokenizer(f"tiktoken:cl100:{path}")
    with pytest.raises(UsageError, match="a byte is missing"):
        load_tokenizer(f"tiktoken:cl100k:{path}")
    path.write_bytes(b"IQ== 0\n!! x\n")
    with pytest.raises(UsageError, match="not a file of ranks"):
        load_tokenizer(f"tiktoken:cl100k:{path}")
    with pytest.raises(UsageError, match="no such file"):
        load_tokenizer(f"tiktoken:cl100k:{tmp_path / 'none'}")


def test_an_encoding_that_cannot_be_downloaded_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(PrimusError, match=r"tiktoken:o200k_base: tiktoken cannot download it") as caught:
        load_tokenizer("tiktoken:o200k_base")
    assert "TIKTOKEN_CACHE_DIR" in caught.value.hint


def test_llama_3_has_its_special_tokens_and_template() -> None:
    scheme = SCHEMES["llama3"]
    assert len(scheme.special) == 256
    assert scheme.special["<|end_of_text|>"] == 128001
    assert scheme.special["<|eot_id|>"] == 128009
    assert scheme.special["<|reserved_special_token_247|>"] == 128255
    assert scheme.before == ("<|begin_of_text|>",)


def test_the_vocabulary_of_megatrons_tiktokenizer_has_its_ids(tmp_path: Path) -> None:
    ranks = ranks_of(small.by_pattern()["tekken"])
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for token, rank in ranks.items()
    ]
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(listed))
    shifted = {token: rank + MEGATRON_SPECIAL for token, rank in ranks.items()}
    for name, pattern in (("", "v2"), ("tiktoken:v1:", "v1")):
        found = load_tokenizer(f"{name}{path}")
        assert (found.eod, found.eod_id, found.bos_id) == ("</s>", 2, 1)
        encoding = library.Encoding(
            "x", pat_str=tiktoken.MEGATRON_PATTERNS[pattern], mergeable_ranks=shifted, special_tokens={}
        )
        for text in (*small.CORPUS, *small.FRAGMENTS):
            assert found.encode(text) == encoding.encode_ordinary(text)
    with pytest.raises(UsageError, match="no pattern 'v3'"):
        load_tokenizer(f"tiktoken:v3:{path}")
