from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data.tokenizers.content import fingerprint_content
from primus.data.tokenizers.document_ends import END_OF_DOCUMENT, END_OF_TEXT
from primus.data.tokenizers.load import load_tokenizer, parse_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.data.tokenizers.trained import train_byte_level_bpe
from primus.errors import PrimusError, UsageError


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_trained_tokenizer_gives_back_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_repeats_in_another_process(prose: Callable[..., str]) -> None:
    text = prose(3000)
    program = (
        "import sys, hashlib\n"
        "from primus.data.tokenizers.trained import train_byte_level_bpe\n"
        "print(hashlib.sha256(train_byte_level_bpe([sys.stdin.read()], 320).content).hexdigest())\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", program], input=text, capture_output=True, text=True, check=True, timeout=60
    )
    assert there.stdout.strip() == hashlib.sha256(train_byte_level_bpe([text], 320).content).hexdigest()


def test_a_vocabulary_without_room_for_the_bytes_is_an_error() -> None:
    with pytest.raises(UsageError, match="256 tokens") as caught:
        train_byte_level_bpe(["a"], 256)
    assert "257" in caught.value.hint


def test_a_file_and_its_folder_are_the_same_tokenizer(tokenizer: Tokenizer, tokenizer_file: Path) -> None:
    from_file, from_folder = load_tokenizer(tokenizer_file), load_tokenizer(str(tokenizer_file.parent))
    assert from_file.fingerprint == from_folder.fingerprint == tokenizer.fingerprint
    assert (from_file.eod, from_file.eod_id, from_file.vocab_size) == (END_OF_TEXT, 0, 300)


def test_a_text_cannot_forge_the_end_of_a_document(tokenizer: Tokenizer, tokenizer_file: Path) -> None:
    assert 0 not in tokenizer.encode(f"a{END_OF_TEXT}b")
    assert load_tokenizer(tokenizer_file, parse_special_tokens=True).encode(f"a{END_OF_TEXT}b")[1] == 0


def test_truncation_and_padding_of_the_file_are_off(tokenizer: Tokenizer) -> None:
    described = json.loads(tokenizer.content)
    described["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    described["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END_OF_TEXT,
    }
    changed = parse_tokenizer(json.dumps(described).encode(), "changed")
    text = "seven wizards make toxic brew"
    assert changed.encode(text) == tokenizer.encode(text)
    assert changed.fingerprint == tokenizer.fingerprint


def test_the_fingerprint_tells_tokenizers_apart_but_not_their_layout(tokenizer: Tokenizer) -> None:
    described = json.loads(tokenizer.content)
    described["model"]["merges"] = [" ".join(merge) for merge in described["model"]["merges"]]
    described["decoder"] = None
    assert fingerprint_content(json.dumps(described).encode()) == tokenizer.fingerprint
    described["model"]["merges"] = described["model"]["merges"][:-1]
    assert fingerprint_content(json.dumps(described).encode()) != tokenizer.fingerprint


@pytest.mark.parametrize("token", END_OF_DOCUMENT)
def test_the_end_of_document_token_of_each_family_is_found(token: str) -> None:
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 7,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "model": {"type": "BPE", "vocab": {"a": 0, token: 7}, "merges": []},
    }
    found = parse_tokenizer(json.dumps(content).encode(), "made up")
    assert (found.eod, found.eod_id) == (token, 7)
    assert found.vocab_size == 8  # ids have a gap: 2 tokens, but 8 rows of an embedding


def test_an_end_of_document_token_that_is_not_there_is_an_error(tokenizer_file: Path) -> None:
    assert load_tokenizer(tokenizer_file, eod="a").eod == "a"
    with pytest.raises(UsageError, match=r"no token '<\|endoftex\|>'") as caught:
        load_tokenizer(tokenizer_file, eod="<|endoftex|>")
    assert END_OF_TEXT in caught.value.hint


def test_what_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer\.json in this folder"):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="no such tokenizer"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UsageError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_hub_name_without_a_network_is_an_error_that_says_so(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    program = (
        "from primus.data.tokenizers.load import load_tokenizer\n"
        "from primus.errors import PrimusError\n"
        "try:\n    load_tokenizer('owner/name')\nexcept PrimusError as error:\n    print(error)\n"
    )
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=60, check=True
    )
    assert "owner/name: the hub is not accessed because HF_HUB_OFFLINE is set" in done.stdout
    assert "HF_HOME" in done.stdout


def test_a_hub_name_is_taken_from_the_cache(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pytest.importorskip("huggingface_hub")
    revision = "0" * 40
    cached = tmp_path / "hub" / "models--owner--name"
    (cached / "snapshots" / revision).mkdir(parents=True)
    (cached / "snapshots" / revision / "tokenizer.json").write_bytes(tokenizer.content)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    program = (
        "from primus.data.tokenizers.load import load_tokenizer\nprint(load_tokenizer('owner/name').fingerprint)\n"
    )
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=60, check=True
    )
    assert done.stdout.strip() == tokenizer.fingerprint


def test_a_missing_hub_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError\n")
    program = "from primus.data.tokenizers.load import load_tokenizer\nload_tokenizer('owner/name')\n"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=60)
    assert "pip install huggingface_hub" in done.stderr
    assert PrimusError.__name__ not in done.stdout
