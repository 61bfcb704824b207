from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes import small_tokenizers as small
from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.megatron.manifest import EncodeRecipe
from primus.data.tokenizers.load import load_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import UsageError

ENDS = ("<|im_end|>", "<|eot_id|>", "<|return|>", "</s>", "<eos>", "[SEP]", "<|END_OF_TURN_TOKEN|>")


def described() -> dict[str, Any]:
    """A tokenizer.json with the ends of several models, and the usual one of Qwen."""
    found: dict[str, Any] = json.loads(small.by_pattern()["qwen2"].content)
    numbers = [*found["model"]["vocab"].values(), *(token["id"] for token in found["added_tokens"])]
    for number, token in enumerate(ENDS, max(numbers) + 1):
        found["model"]["vocab"][token] = number
        found["added_tokens"].append({**found["added_tokens"][0], "id": number, "content": token})
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(described()))
    return path


def added(token: str) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": token, "lstrip": False, "rstrip": False, "normalized": False}


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
QWEN = {"tokenizer_class": "Qwen2Tokenizer"}


@pytest.mark.parametrize(
    ("files", "end"),
    [  # what AutoTokenizer.from_pretrained(FOLDER).eos_token of transformers 5 is for the same files
        ({"tokenizer_config": QWEN | {"eos_token": "<|im_end|>", "added_tokens_decoder": {}}}, "<|im_end|>"),
        ({"tokenizer_config": GENERIC | {"eos_token": added("<|eot_id|>")}}, "<|eot_id|>"),
        (
            {"tokenizer_config": GENERIC | {"eos_token": "<|return|>"}, "special_tokens_map": {"eos_token": "</s>"}},
            "</s>",  # an old file: the map wins
        ),
        (
            {
                "tokenizer_config": GENERIC | {"eos_token": "<|return|>", "added_tokens_decoder": {}},
                "special_tokens_map": {"eos_token": added("</s>")},
                "generation_config": {"eos_token_id": [1, 2]},
            },
            "<|return|>",
        ),
        ({"tokenizer_config": GENERIC, "special_tokens_map": {"eos_token": "<eos>"}}, "<eos>"),
        ({"tokenizer_config": GENERIC | {"eos_token": None, "sep_token": "[SEP]"}}, "[SEP]"),
        ({"tokenizer_config": {"tokenizer_class": "CohereTokenizerFast"}}, "<|END_OF_TURN_TOKEN|>"),
        ({"config": {"model_type": "qwen3_moe", "eos_token_id": 3}}, "<|endoftext|>"),
        ({}, "<|endoftext|>"),
    ],
)
def test_a_folder_declares_the_end_that_megatron_takes(folder: Path, files: dict[str, Any], end: str) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    for name in (folder, folder / "tokenizer.json"):
        found = load_tokenizer(name, fast=False, follow_declared=True)
        assert found.eod == end
        assert found.eod_id == described()["model"]["vocab"].get(end, found.eod_id)
        assert load_tokenizer(name, fast=False).eod == "<|endoftext|>"
        assert load_tokenizer(name, eod="</s>", fast=False, follow_declared=True).eod == "</s>"


@pytest.mark.parametrize("config", ["config", "generation_config"])
def test_the_ids_of_the_model_say_it_where_no_token_does(folder: Path, config: str) -> None:
    number = described()["model"]["vocab"]["<|eot_id|>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(GENERIC))
    (folder / f"{config}.json").write_text(json.dumps({"eos_token_id": [number, 7]}))
    assert load_tokenizer(folder, fast=False, follow_declared=True).eod == "<|eot_id|>"
    (folder / f"{config}.json").write_text(json.dumps({"text_config": {"eos_token_id": number}}))
    assert load_tokenizer(folder, fast=False, follow_declared=True).eod == "<|eot_id|>"


def test_the_end_of_a_folder_is_taken_where_the_vocabulary_has_no_usual_one(folder: Path) -> None:
    content = described()
    for known in ("<|endoftext|>", "</s>", "<eos>", "[SEP]"):
        content["model"]["vocab"].pop(known, None)
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != known]
    content["model"]["vocab"]["filler"] = 0  # what had the first id
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(folder, fast=False).eod is None
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert load_tokenizer(folder, fast=False).eod == "<|im_end|>"


def test_files_beside_a_tokenizer_of_another_name_say_nothing(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "tokenizer.json").rename(folder / "data.tokenizer.json")
    assert load_tokenizer(folder / "data.tokenizer.json", fast=False, follow_declared=True).eod == "<|endoftext|>"


def test_a_damaged_file_is_an_error_that_names_it(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"eos_token"')
    with pytest.raises(UsageError, match=r"tokenizer_config\.json: not JSON"):
        load_tokenizer(folder, fast=False)


def test_encoding_says_which_end_it_takes(folder: Path, tmp_path: Path) -> None:
    def encoded(name: str, **changes: Any) -> tuple[str | None, str]:
        said: list[str] = []
        job = EncodeJob(inputs=(str(text),), output=tmp_path / name, tokenizer=str(folder), **changes)
        return prepare_token_files(job, said.append)[0].manifest.tokenizer.eod, "\n".join(said)

    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "some words"}\n')
    (folder / "tokenizer_config.json").write_text(json.dumps(QWEN | {"eos_token": "<|im_end|>"}))
    eod, said = encoded("own")
    assert eod == "<|endoftext|>"
    assert f"documents end with <|endoftext|>, but {folder}/tokenizer_config.json names <|im_end|>" in said
    eod, said = encoded("megatron", follow_declared=True)
    assert eod == "<|im_end|>"
    assert f"documents end with <|im_end|> ({folder}/tokenizer_config.json)" in said
    eod, said = encoded("named", eod="</s>")
    assert (eod, "documents end" in said) == ("</s>", False)
    (folder / "tokenizer_config.json").write_text(json.dumps(QWEN | {"eos_token": "<|nowhere|>"}))
    with pytest.raises(
        UsageError, match=r"declares <\|nowhere\|> as the end of a text, but the vocabulary does not have it"
    ):
        encoded("unknown", follow_declared=True)
    assert encoded("without", follow_declared=True, recipe=EncodeRecipe(append_eod=False))[0] == "<|endoftext|>"


def test_a_tokenizer_that_was_loaded_from_content_has_no_files_beside_it(tokenizer: Tokenizer) -> None:
    assert (tokenizer.declared_end, tokenizer.declared_eod) == (None, None)
