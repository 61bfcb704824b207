"""Experiments are shown with their origins, checked, described and begun."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from primus.cli.main import main

EXPERIMENT = """\
env: {HF_TOKEN: canary, PLAIN: 'yes'}
modules:
  pre_trainer:
    model: tiny.yaml
    overrides: {mock_data: true, seq_length: 128, lr: 1.0e-2}
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    return tmp_path


def said(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["direct", "--", *words.split()]) == 0
    return capsys.readouterr().out


def test_every_value_is_shown_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [" ".join(line.split()) for line in said("config show --config e.yaml --seed 5", capsys).splitlines()]
    for line in (
        "env.HF_TOKEN: <secret> # e.yaml:1",
        "env.PLAIN: yes # e.yaml:1",
        "num_layers: 2 # preset:tiny.yaml:2",
        "lr: 0.01 # e.yaml:5",
        "seed: 5 # --seed",
        "clip_grad: 1.0 # default",
        "load: null # default",
        "mock_data: true # e.yaml:5",
    ):
        assert line in lines


def test_only_changed_values_are_shown_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = said("config show --config e.yaml --changed", capsys)
    assert "lr: 0.01" in text
    assert "# default" not in text
    assert "checkpoint:" not in text


def test_values_are_json_where_that_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(said("config show --config e.yaml --json", capsys))
    assert value["optimizer"]["lr"] == {"value": 0.01, "origin": "e.yaml:5"}
    assert value["experiment"]["env.HF_TOKEN"]["value"] == "<secret>"


def test_a_valid_experiment_is_said_to_be_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert said("config check --config e.yaml", capsys) == "e.yaml: valid (native, e)\n"
    value = json.loads(said("config check --exp e.yaml --json", capsys))
    assert value == {"config": "e.yaml", "valid": True, "framework": "native", "notes": []}


def test_a_model_that_a_named_machine_cannot_hold_is_an_error(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    (workplace / "big.yaml").write_text(EXPERIMENT.replace("tiny.yaml", "llama3.1_405B.yaml"))
    assert main("direct -- config check --config big.yaml --assume mi355x:8 --nnodes 2".split()) == 2
    assert "need at least" in capsys.readouterr().err
    assert "note" not in said("config check --config big.yaml --assume mi355x:8 --nnodes 3", capsys)
    assert "it does not fit this machine" in said("config check --config big.yaml", capsys)


def test_the_schema_is_json_or_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said("config schema", capsys))["title"] == "primus experiment"
    assert said("config schema --text", capsys).startswith("# Configuration keys")


def test_a_starting_file_is_printed_or_written_and_valid(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    text = said("config init LLAMA3.1-8b", capsys)
    assert text.startswith("# Pre-training of llama3.1_8B: ")
    wrote = "wrote new/mine.yaml, and for editors new/primus.schema.json\n"
    assert said("config init llama3.1_8B --output new/mine.yaml", capsys) == wrote
    first = "# yaml-language-server: $schema=primus.schema.json\n"
    assert (workplace / "new/mine.yaml").read_text() == first + text
    schema = json.loads((workplace / "new/primus.schema.json").read_text())
    jsonschema.validate(yaml.safe_load(text), schema)
    assert "valid" in said("config check --config new/mine.yaml", capsys)


def test_a_printed_starting_file_names_the_published_schema_once_there_is_a_site(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = said("config init llama3.2_1B", capsys)
    monkeypatch.setattr("primus.SITE_ADDRESS", "https://docs.example/primus/")
    first = "# yaml-language-server: $schema=https://docs.example/primus/schemas/primus.schema.json\n"
    assert said("config init llama3.2_1B", capsys) == first + text


def test_a_starting_file_shows_the_shape_of_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = said("config init llama3.2_1B", capsys)
    assert "      # num_layers: 16\n" in text and "      # vocab_size: 128256\n" in text


def test_a_starting_file_of_a_folder_of_hugging_face_starts_from_its_weights(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    folder = workplace / "mine"
    folder.mkdir()
    shape = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 72, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **shape}))
    text = said("config init mine", capsys)
    assert "load: null" in text and "tokenizer_model: null" in text
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    said("config init mine --output f.yaml", capsys)
    text = (workplace / "f.yaml").read_text()
    for line in ("model: null", "load: hf:mine", "finetune: true", "tokenizer_model: mine", "num_layers: 3"):
        assert f" {line}\n" in text
    said("config check --config f.yaml", capsys)


def test_a_starting_file_names_an_imported_model_by_its_file(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    (workplace / "own.yaml").write_text("extends: tiny.yaml\nnum_layers: 3\n")
    said("config init own.yaml --output f.yaml", capsys)
    assert "    model: own.yaml\n" in (workplace / "f.yaml").read_text()
    said("config check --config f.yaml", capsys)


def test_a_file_is_replaced_only_where_that_is_asked_for(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    assert main("direct -- config init tiny --output e.yaml".split()) == 2
    assert capsys.readouterr().err == "primus-cli: e.yaml exists\n  --force replaces it\n"
    assert (workplace / "e.yaml").read_text() == EXPERIMENT
    said("config init tiny --output e.yaml --force", capsys)
    assert "tiny" in (workplace / "e.yaml").read_text().splitlines()[1]


def test_a_broken_experiment_is_exit_code_2_and_one_message(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT.replace("lr:", "lrr:"))
    assert main("direct -- config check --config e.yaml".split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", "primus-cli: e.yaml:5: unknown key 'lrr'; did you mean 'lr'?")


def test_variables_of_a_typed_file_reach_the_experiment(
    capsys: pytest.CaptureFixture[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATE_OF_DAY", "0.5")  # so that the value that the command sets is taken back
    (workplace / "vars").write_text("RATE_OF_DAY=0.25\n")
    block = "overrides:\n      mock_data: true\n      seq_length: 128\n      lr: ${RATE_OF_DAY}\n"
    (workplace / "e.yaml").write_text(EXPERIMENT.partition("overrides:")[0] + block)
    assert main(["direct", "--env", "vars", "--", "config", "show", "--config", "e.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"]["lr"] == {"value": 0.25, "origin": "$RATE_OF_DAY"}
