"""MaxText's own trainer, in turns: `python -m engines.maxtext_trainer SETTING_JSON`.

Program, loop, step and synthetic data are those of `maxtext.trainers.pre_train.train`. Settings that the benchmark does
not name have MaxText's defaults, apart from `remat_policy`, which recomputes less than the default and is faster.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # MaxText then imports no client of Google Cloud

import jax

jax.config.update("jax_platforms", "cpu")

from maxtext.input_pipeline.synthetic_data_processing import SyntheticDataIterator  # noqa: E402
from maxtext.trainers.pre_train import train  # noqa: E402
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR  # noqa: E402

from engines.gate import StepGate  # noqa: E402
from engines.setting import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Setting  # noqa: E402


def main() -> None:
    setting = Setting(**json.loads(sys.argv[1]))
    gate_batches(StepGate(finish_steps))
    with tempfile.TemporaryDirectory() as folder:
        values = [f"{name}={value}" for name, value in list_settings(setting, folder).items()]
        train.main(["train", os.path.join(MAXTEXT_CONFIGS_DIR, "base.yml"), *values])


def gate_batches(gate: StepGate) -> None:
    """Let MaxText's loader give a batch when a step is asked for; without one, MaxText ends."""
    draw = SyntheticDataIterator.__next__

    def draw_batch(iterator: SyntheticDataIterator) -> Any:
        if not gate.wait():
            raise StopIteration
        return draw(iterator)

    SyntheticDataIterator.__next__ = draw_batch


def finish_steps() -> None:
    """Wait for all that is computed: MaxText asks for the next batch while a step runs."""
    jax.block_until_ready(jax.live_arrays())


def list_settings(setting: Setting, folder: str) -> dict[str, Any]:
    return {
        "run_name": "speed",
        "base_output_directory": folder,
        "jax_cache_dir": os.environ["ENGINE_SPEED_CACHE"],
        "hardware": "cpu",
        "num_slices": 1,
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "dataset_type": "synthetic",
        "packing": False,
        "enable_dropout": False,
        "attention": "dot_product",
        "remat_policy": "minimal",
        "sharding_tolerance": 1.0,
        "decoder_block": "llama2",
        "base_emb_dim": setting.dim,
        "base_num_query_heads": setting.heads,
        "base_num_kv_heads": setting.heads,
        "head_dim": setting.dim // setting.heads,
        "base_mlp_dim": setting.ffn,
        "base_num_decoder_layers": setting.layers,
        "vocab_size": setting.vocab,
        "mlp_activations": "['silu','linear']",
        "normalization_layer_epsilon": setting.norm_epsilon,
        "rope_max_timescale": int(setting.rope_theta),
        "logits_via_embedding": False,
        "max_target_length": setting.sequence,
        "per_device_batch_size": setting.batch,
        "dtype": "float32",
        "matmul_precision": "highest",
        "steps": 1_000_000,
        "learning_rate": LEARNING_RATE,
        "warmup_steps_fraction": 0.0,
        "learning_rate_final_fraction": 1.0,
        "adam_b1": BETAS[0],
        "adam_b2": BETAS[1],
        "adam_eps": EPSILON,
        "adam_weight_decay": WEIGHT_DECAY,
        "gradient_clipping_threshold": CLIP,
        "init_weights_seed": SEED,
    }


if __name__ == "__main__":
    main()
