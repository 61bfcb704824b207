"""What the tests of MaxText run in its interpreter: `maxtext_steps.py NAME ...` prints the results as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import engine_steps
import jax
import msgspec

from primus.backends.maxtext.engine import MaxTextEngine
from primus.backends.maxtext.layout import build_config, plan_layout
from primus.config.schema import Trainer
from primus.errors import UsageError
from primus.patches import maxtext_tied_logits

jax.config.update("jax_platforms", "cpu")

FOLDER = Path(tempfile.gettempdir())
LLAMA = {"original_max_position_embeddings": 8192, "untie_embeddings_and_output_weights": False}
"""The rope of Llama 3.1, of which MaxText has no other length, and tied embeddings."""


def build_engine(trainer: Trainer, eod_id: int | None = None) -> MaxTextEngine:
    layout = plan_layout(trainer, FOLDER, on_cpu=True)
    size = trainer.training.global_batch_size or trainer.training.micro_batch_size
    return MaxTextEngine(trainer, build_config(trainer, FOLDER, True, layout, size), layout, eod_id)


def build_trainer(kind: str) -> Trainer:
    return engine_steps.build_trainer(kind, **({"model": LLAMA} if kind == "llama" else {}))


def compare_llama() -> dict[str, float]:
    maxtext_tied_logits.apply()
    return engine_steps.compare_with_native(build_engine, build_trainer("llama"))


def resume() -> dict[str, object]:
    """Steps of a run, and those of one that is saved in the middle and loaded by another engine."""
    trainer = build_trainer("qwen3")
    whole = build_engine(trainer)
    whole.load_weights(engine_steps.draw_weights(trainer))
    expected = engine_steps.train_engine(whole, trainer, 0, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole.save(folder)
        expected += engine_steps.train_engine(whole, trainer, 3, 6)
        resumed = build_engine(trainer)
        resumed.load(folder)
        found = engine_steps.train_engine(resumed, trainer, 3, 6)
        files = sorted(path.name for path in folder.iterdir())
    native = engine_steps.measure_differences(engine_steps.train_native(trainer)[:6], expected)
    return {"expected": expected[3:], "found": found, "files": files, "native": native}


def refuse_sizes() -> str:
    """The error of a mesh that has more devices than there are."""
    trainer = build_trainer("qwen3")
    try:
        plan_layout(msgspec.structs.replace(trainer, backend_args={"ici_fsdp_parallelism": 3}), FOLDER, on_cpu=True)
    except UsageError as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
