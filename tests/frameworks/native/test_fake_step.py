"""A step on fake tensors computes the matrix products of a real one, without its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from primus import experiment
from primus.config.schema import Experiment
from primus.frameworks.native.engine.fake_step import run_fake_step
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.step import prepare_model
from primus.tuning.gemm.product_recorder import ProductRecorder


def load(folder: Path, model: str, **settings: Any) -> Experiment:
    overrides = {"mock_data": True, "seq_length": 32, "micro_batch_size": 2, **settings}
    module = {"framework": "native", "model": model, "overrides": overrides}
    whole = {"exp_name": "night", "workspace": str(folder), "modules": {"pre_trainer": module}}
    (folder / "night.yaml").write_text(yaml.safe_dump(whole))
    return experiment.resolve_experiment(folder / "night.yaml", (), {}).experiment


@pytest.mark.parametrize("settings", [{"bf16": False}, {"bf16": True, "recompute_activations": True}])
def test_a_fake_step_has_the_products_of_a_real_one(settings: dict[str, Any], tmp_path: Path) -> None:
    asked = load(tmp_path, "tiny", **settings)
    fake = ProductRecorder()
    run_fake_step(asked, "cpu", fake)
    model = build_model(asked.trainer.model, "cpu", seed=1)
    model.configure(asked.trainer.training)
    trainable = prepare_model(model, device="cpu")
    tokens = torch.randint(0, 512, (2, 33))
    with ProductRecorder() as real:
        trainable.loss(tokens[:, :-1], tokens[:, 1:], torch.ones(())).backward()
    assert fake.counts == real.counts


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_model_that_does_not_fit_has_products_of_an_accelerator(recomputes: bool, tmp_path: Path) -> None:
    settings = {"seq_length": 8192, "bf16": True, "recompute_activations": recomputes}
    asked = load(tmp_path, "llama3.1_405B", num_layers=2, **settings)
    recorder = ProductRecorder()
    run_fake_step(asked, "cuda", recorder)
    keys = {product.key for product in recorder.counts}
    assert "mm 16384x106496x16384 NT bfloat16" in keys
    # Two layers of four products, the loss in four chunks; each has two derivatives. Of a layer that is computed again
    # nobody needs the last product.
    assert recorder.counts.total() == 3 * (2 * 4 + 4) + (2 * 3 if recomputes else 0)
    # Attention is one kernel there, not products.
    assert not any("bmm" in key for key in keys)
