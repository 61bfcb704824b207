"""A starting file is valid as it is and explains every line."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus import registry
from primus.config.checks import check_data, check_lengths, count_accumulation_steps
from primus.config.extended_files import load_model
from primus.config.load import load_experiment
from primus.config.template import format_starting_file


@pytest.mark.parametrize("name", registry.list_plug_ins("models"))
def test_a_starting_file_is_valid(name: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(format_starting_file(name, load_model(name)))
    resolved = load_experiment(file, environ={})
    assert resolved.experiment.trainer.model == load_model(name)
    assert resolved.experiment.exp_name == f"{name}-pretrain"
    check_lengths(resolved)
    check_data(resolved)
    assert count_accumulation_steps(resolved, 8) == 1


def test_a_starting_file_repeats_the_defaults_of_the_schema(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(format_starting_file("llama3.1_8B", load_model("llama3.1_8B")))
    trainer = load_experiment(file, environ={}).experiment.trainer
    file.write_text("modules: {pre_trainer: {model: llama3.1_8B.yaml}}")
    default = load_experiment(file, environ={}).experiment.trainer
    assert (trainer.optimizer, trainer.parallel) == (default.optimizer, default.parallel)
    assert (trainer.checkpoint, trainer.logging) == (default.checkpoint, default.logging)


def test_every_key_of_a_starting_file_stands_below_its_meaning() -> None:
    lines = format_starting_file("tiny", load_model("tiny")).splitlines()
    keys = [index for index, line in enumerate(lines) if line and "#" not in line and not line.endswith("er:")]
    unexplained = [lines[index] for index in keys if not lines[index - 1].lstrip().startswith("# ")]
    assert unexplained == ["modules:"]
    assert len(keys) > 40


def test_the_meaning_of_a_key_may_be_given() -> None:
    from primus.config.template import collect_key_docs

    docs = collect_key_docs() | {"lr": "How fast it learns."}
    text = format_starting_file("tiny", load_model("tiny"), docs)
    assert "      # How fast it learns.\n      lr: 0.0003\n" in text
