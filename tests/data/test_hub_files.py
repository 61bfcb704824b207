"""What an exported tokenizer declares: its class for transformers, its special tokens, and where generation stops."""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from engine_python import run_engine
from primus.data.hub_files import HubFiles, TokenizerFiles
from primus.data.instruction.chat_template import ChatTemplate
from primus.data.instruction.encode import find_turn_end
from primus.data.tokenizers.load import load_tokenizer
from primus.data.tokenizers.trained import train_byte_level_bpe
from primus.errors import PrimusError

TURNS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<turn_end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(folder: Path, specials: list[str], **config: Any) -> Path:
    """A tokenizer of bytes with special tokens from id 256 on."""
    folder.mkdir()
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def build(name: Path, others: HubFiles | None = None, *, ends_turns: bool = False) -> tuple[HubFiles, Any, Any]:
    """The files, and the content of tokenizer_config.json and of generation_config.json."""
    files = TokenizerFiles(str(name)).build_files(others or {}, 128, ends_turns=ends_turns)
    return files, *(json.loads(files[file]) for file in ("tokenizer_config.json", "generation_config.json"))


def test_the_tokenizer_of_token_files_gets_a_class_and_its_special_tokens(tmp_path: Path) -> None:
    trained = train_byte_level_bpe(["a text of words, of words"], 300)
    (tmp_path / "c_text_document.tokenizer.json").write_bytes(trained.content)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')  # of something else in this folder
    files, config, generation = build(tmp_path / "c_text_document.tokenizer.json")
    assert files["tokenizer.json"] == trained.content
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and config["model_max_length"] == 128
    assert {config[f"{name}_token"] for name in ("bos", "eos", "pad")} == {"<|endoftext|>"}
    assert generation == {f"{name}_token_id": trained.eod_id for name in ("bos", "eos", "pad")}


def test_files_that_say_everything_stay_byte_by_byte(tmp_path: Path) -> None:
    declared = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<stop>", "pad_token": "<pad>", "bos_token": None}
    folder = write_tokenizer(tmp_path / "tok", ["<stop>", "<pad>"], **declared)
    # Neither is laid out as this package would write it.
    generation = b'{"eos_token_id": [256], "pad_token_id": 257,\n  "bos_token_id": 256, "temperature": 0.6}'
    (folder / "generation_config.json").write_bytes(generation)
    (folder / "tokenizer_config.json").write_bytes(given := json.dumps(declared, indent=7).encode())
    files, _, _ = build(folder)
    assert files["tokenizer_config.json"] == given
    assert files["generation_config.json"] == generation


def test_special_tokens_are_those_that_any_file_declares(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tok", ["<|endoftext|>", "<start>", "<stop>", "<pad>"])
    special = {"eos_token": {"content": "<stop>"}, "bos_token": "<start>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "<pad>"}}))
    _, config, generation = build(folder)
    assert generation == {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 259}
    assert config["pad_token"] == {"content": "<pad>"} and config["eos_token"] == "<stop>"


@pytest.mark.parametrize(
    ("generation", "ends_turns", "expected"),
    [
        ({}, False, [256, 257]),  # whoever chats with a model that has a template wants it to stop
        ({"eos_token_id": 256}, False, 256),  # as it was published
        ({"eos_token_id": 256}, True, [256, 257]),  # trained here on conversations
        ({"eos_token_id": [257, 256]}, True, [257, 256]),
    ],
)
def test_generation_stops_at_the_end_of_a_turn(
    tmp_path: Path, generation: dict[str, Any], ends_turns: bool, expected: Any
) -> None:
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TURNS}
    folder = write_tokenizer(tmp_path / "tok", ["<|endoftext|>", "<turn_end>"], **declared)
    others = {"generation_config.json": json.dumps(generation).encode()} if generation else {}
    assert build(folder, others, ends_turns=ends_turns)[2]["eos_token_id"] == expected


def test_what_belongs_to_a_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tok", ["<|endoftext|>"], tokenizer_class="A", eos_token="<|endoftext|>")
    others = {"chat_template.jinja": TURNS.encode(), "tokenizer_config.json": b'{"tokenizer_class": "B"}'}
    files, config, _ = build(folder, others)
    assert files["chat_template.jinja"] == TURNS.encode() and config["tokenizer_class"] == "A"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS, "<turn_end>"),
        (TURNS.replace("\n", ""), "<turn_end>"),
        (TURNS.replace("<turn_end>", ""), ""),
        (TURNS.replace("<turn_end>", "<end>"), "<end>"),
        ("{{ raise_exception('a system message is needed') }}", ""),
    ],
)
def test_the_end_of_a_turn_is_the_special_token_behind_an_answer(template: str, expected: str) -> None:
    assert find_turn_end(ChatTemplate("t", template, {}), ("<end>", "<turn_end>", "end>")) == expected


KINDS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "llama": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True},
    "gemma": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<turn>"],
    },
}
TEXTS = [
    "a line of 7 words",
    "  two  spaces,\n\tand a tab ",
    "na\u00efve \u65e5\u672c \ufb01 \uff21",
    "",
    " x",
    "x__\u2581 y",
]


def train_sentencepiece(folder: Path, kind: str, model_type: str) -> Path:
    spm = pytest.importorskip("sentencepiece")
    folder.mkdir()
    (folder / "text").write_text("".join(f"{line}\n" for line in inspect.getsource(argparse).splitlines()))
    prefix = str(folder / "tokenizer")
    sizes = {"vocab_size": 500, "minloglevel": 2, "input_sentence_size": 400}
    spm.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=prefix, model_type=model_type, **sizes, **KINDS[kind]
    )
    return folder


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sentencepiece_model_gets_a_tokenizer_json_with_its_ids(tmp_path: Path, kind: str, model_type: str) -> None:
    folder = train_sentencepiece(tmp_path / "tok", kind, model_type)
    files, config, generation = build(folder)
    own = load_tokenizer(str(folder), fast=False)
    assert files["tokenizer.model"] == own.content
    assert (config["tokenizer_class"], config["bos_token"]) == ("PreTrainedTokenizerFast", "<s>")
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    made = Tokenizer.from_str(files["tokenizer.json"].decode())
    texts = [*TEXTS, *(["one <turn> two<turn>"] if kind == "gemma" else [])]
    for text in texts:
        ids = own.encode(text)
        assert made.encode(text, add_special_tokens=False).ids == ids, text
        assert made.encode(text).ids == [1, *ids]
        assert 0 in ids or made.decode(ids) == own.exact.decode(ids)


@pytest.mark.engine("huggingface")
@pytest.mark.slow
def test_transformers_gives_the_ids_of_the_sentencepiece_model(tmp_path: Path) -> None:
    expected = {}
    for kind, model in itertools.product(KINDS, ("bpe", "unigram")):
        folder = train_sentencepiece(tmp_path / f"{kind}-{model}", kind, model)
        own, out = load_tokenizer(str(folder), fast=False), tmp_path / f"out-{folder.name}"
        out.mkdir()
        for name, content in build(folder)[0].items():
            (out / name).write_bytes(content)
        expected[str(out)] = [[1, *own.encode(text)] for text in TEXTS]
    code = f"""
import json
from transformers import AutoTokenizer
tokenizers = {{name: AutoTokenizer.from_pretrained(name) for name in {list(expected)}}}
print(json.dumps({{name: [each(text)["input_ids"] for text in {TEXTS!r}] for name, each in tokenizers.items()}}))
"""
    assert json.loads(run_engine("huggingface", code).splitlines()[-1]) == expected


def test_a_sentencepiece_model_whose_rules_transformers_lacks_is_refused(tmp_path: Path) -> None:
    folder = train_sentencepiece(tmp_path / "tok", "defaults", "unigram")
    content = (folder / "tokenizer.model").read_bytes()
    # Field 24 of the trainer's settings (number 2): white space is a suffix.
    (folder / "tokenizer.model").write_bytes(content + b"\x12\x03\xc0\x01\x01")
    with pytest.raises(PrimusError, match=r"no tokenizer.json gives the ids of this SentencePiece model"):
        build(folder)
