"""What the tests of the JAX engine run in its interpreter: `jax_steps.py NAME ...` prints the results as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import engine_steps
import jax
import numpy as np

from primus.config.schema import Trainer
from primus.frameworks.jax.engine.driver import JaxEngine
from primus.frameworks.jax.engine.model import sum_rows_pairwise
from primus.frameworks.jax.engine.sharding import plan_layout
from primus.session.checkpoints import array_files

jax.config.update("jax_platforms", "cpu")


def build_engine(trainer: Trainer, eod_id: int | None = None) -> JaxEngine:
    return JaxEngine(trainer, plan_layout(trainer.parallel), eod_id)


def compare_kinds() -> dict[str, dict[str, float]]:
    found = {
        kind: engine_steps.compare_with_native(build_engine, engine_steps.build_trainer(kind))
        for kind in engine_steps.KINDS
    }
    return found | {"trained": engine_steps.compare_trained_model(build_engine)}


def compare_settings() -> dict[str, dict[str, float]]:
    """Differences in one step's path that the default settings do not take."""
    documents = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}
    trainers = {
        "documents": (engine_steps.build_trainer("llama", data=documents), 7),
        "recompute and small chunks": (
            engine_steps.build_trainer("qwen3", training={"recompute_activations": True, "loss_chunk_size": 16}),
            None,
        ),
    }
    return {name: engine_steps.compare_with_native(build_engine, *args) for name, args in trainers.items()}


def compare_layouts() -> dict[str, dict[str, float]]:
    """Two devices of one process."""
    layouts = {
        "sharded": {},
        "replicated": {"use_distributed_optimizer": False},
        "tensor": {"tensor_model_parallel_size": 2},
        "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    }
    assert len(jax.devices()) == 2
    trainers = {name: engine_steps.build_trainer("qwen3", parallel=layout) for name, layout in layouts.items()}
    native = engine_steps.train_native(trainers["sharded"])
    return {
        name: engine_steps.compare_with_native(build_engine, each, native=native) for name, each in trainers.items()
    }


def resume() -> dict[str, object]:
    """Steps of a run, and those of one that is saved in the middle and loaded by another engine."""
    trainer = engine_steps.build_trainer("qwen2.5")
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
        names = read_tensor_names(folder / "model.safetensors")
    return {"expected": expected[3:], "found": found, "files": files, "names": names}


def save_types() -> dict[str, bool]:
    """Whether arrays of each type that engines on JAX have come back from a file as they were."""
    arrays = {
        str(kind): jax.numpy.arange(6, dtype=kind).reshape(2, 3) for kind in ("float32", "bfloat16", "int32", "uint32")
    }
    arrays["scalar"] = jax.numpy.int32(7)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "arrays"
        sources = {key: array_files.ArraySource(each) for key, each in arrays.items()}
        array_files.save_arrays({path: sources}, is_writer=True)
        saved = array_files.open_arrays(path)
        return {
            key: saved[key].dtype == each.dtype and bool((saved[key] == each).all()) for key, each in arrays.items()
        }


def read_tensor_names(path: Path) -> list[str]:
    """Names in the header of a safetensors file, whose package the environment of jax may lack."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return sorted(json.loads(file.read(size)).keys() - {"__metadata__"})


def skip_nonfinite() -> dict[str, object]:
    """A step with an infinite weight changes nothing."""
    trainer = engine_steps.build_trainer("llama")
    engine = build_engine(trainer)
    engine.load_weights(engine_steps.draw_weights(trainer))
    key = "model.norm.weight"
    engine.weights[key] = engine.weights[key] * np.float32(np.inf)
    before = np.asarray(engine.weights["model.embed_tokens.weight"])
    value = engine.step(list(engine_steps.draw_tokens()[0]), 1e-3)
    after = np.asarray(engine.weights["model.embed_tokens.weight"])
    return {"skipped": value.skipped, "unchanged": bool((before == after).all())}


def sum_losses() -> float:
    """Largest error of the mean of losses that is due to their summation in float32."""
    values = 6.25 + 0.1 * np.random.default_rng(0).standard_normal((20, 8, 64))
    losses = values.astype(np.float32)
    add = jax.jit(lambda losses_BS: sum_rows_pairwise(losses_BS).sum() / losses_BS.size)
    return max(abs(float(add(each)) - each.astype(np.float64).mean()) for each in losses)


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
