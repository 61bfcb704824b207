"""All public examples of a Primus checkout, whose folder is in $PRIMUS_TEST_PRIMUS_CHECKOUT."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from primus.config.load import load_experiment
from primus.errors import UsageError
from primus.experiment import CONFIG_FILE, format_files, resolve_settings

CHECKOUT = Path(os.environ.get("PRIMUS_TEST_PRIMUS_CHECKOUT", "/nonexistent"))
TOOL = Path(__file__).parents[3] / "tools/check_primus_examples.py"

pytestmark = [
    pytest.mark.skipif(not CHECKOUT.is_dir(), reason="PRIMUS_TEST_PRIMUS_CHECKOUT names no checkout"),
    pytest.mark.slow,
]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_primus_examples", TOOL)
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_examples_that_train_language_models_are_accepted_unless_no_engine_has_their_layers() -> None:
    tool = load_tool()
    checked = [
        example
        for example in tool.check_examples(CHECKOUT)
        if example.framework in ("megatron", "torchtitan") and "diffusion" not in example.file
    ]
    refused = [example for example in checked if example.problem and not tool.lacks_files(example)]
    others = [example for example in refused if ": megatron does not support " not in example.problem]
    assert len(checked) > 300
    assert len(others) / len(checked) < 0.02, others
    assert len(refused) / len(checked) < 0.15


def test_an_accepted_example_written_to_a_run_folder_means_the_same(tmp_path: Path) -> None:
    files = [
        file
        for folder in ("megatron", "torchtitan")
        for file in sorted((CHECKOUT / "examples" / folder).rglob("configs/MI300X/*.yaml"))
    ]
    num_accepted = 0
    for file in files:
        try:
            resolved = resolve_settings(file, (), {}, absent=[])
        except UsageError:
            continue
        num_accepted += 1
        for name, text in format_files(resolved).items():
            target = tmp_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        again = load_experiment(tmp_path / CONFIG_FILE, environ=None)  # translated again, as a copy is
        assert again.experiment == resolved.experiment, file
    assert len(files) > 80
    assert num_accepted / len(files) > 0.9
