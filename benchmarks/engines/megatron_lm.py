"""Megatron-LM's own `pretrain()` with the step of its `pretrain_gpt.py`, in turns: `torchrun -m engines.megatron_lm
SETTING_JSON`, with the checkout on PYTHONPATH.

Arguments, model, optimizer, loop and logging are those of the checkout. The batches are those of the benchmark, since
its mock data needs a compiled helper; it runs on a CPU by the patches that primus applies as well.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from engines.gate import StepGate
from engines.setting import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Setting
from engines.worker import NUM_BATCHES, make_batches
from primus import registry
from primus.frameworks.megatron.engine.checkout import CPU_ARGUMENTS
from primus.patch import PATCHES

NUM_STEPS = 1_000_000


class Samples(Dataset):
    """The batches of the benchmark, sample by sample, as `GPTDataset` gives them."""

    def __init__(self, setting: Setting) -> None:
        batches = make_batches(setting)
        self._tokens = torch.cat([tokens for tokens, _ in batches])
        self._targets = torch.cat([targets for _, targets in batches])
        self._mask = torch.ones(setting.sequence)
        self._positions = torch.arange(setting.sequence)
        self._future = torch.ones(1, setting.sequence, setting.sequence, dtype=torch.bool).triu(1)

    def __len__(self) -> int:
        return len(self._tokens) * NUM_STEPS // NUM_BATCHES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = index % len(self._tokens)
        return {
            "tokens": self._tokens[row],
            "labels": self._targets[row],
            "loss_mask": self._mask,
            "position_ids": self._positions,
            "attention_mask": self._future,
        }


def main() -> None:
    setting = Setting(**json.loads(sys.argv[1]))
    for patch in ("megatron-core-cpu", "megatron-core-torch-parts", "megatron-core-checkpoint-queue"):
        registry.load_plug_in(PATCHES, patch).apply()
    dist.init_process_group("gloo")
    import pretrain_gpt
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.enums import ModelType
    from megatron.training import initialize, training

    # Megatron-LM makes its groups only where it finds GPUs.
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    initialize._compile_dependencies = lambda: None  # of its data sets
    training.set_jit_fusion_options = lambda: None  # compiles functions for GPUs
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    gate_steps(training, StepGate())
    sys.argv = ["pretrain_gpt.py", *list_words(setting)]

    def provide_samples(sizes: Any, vp_stage: int | None = None) -> tuple[Dataset, None, None]:
        return Samples(setting), None, None

    provide_samples.is_distributed = True  # type: ignore[attr-defined]
    build_model = functools.partial(pretrain_gpt.model_provider, pretrain_gpt.gpt_builder)
    training.pretrain(provide_samples, build_model, ModelType.encoder_or_decoder, pretrain_gpt.forward_step)


def gate_steps(training: Any, gate: StepGate) -> None:
    """Let the loop of Megatron-LM take a step when it is asked for."""
    take_step = training.train_step

    def take_gated_step(*arguments: Any, **options: Any) -> Any:
        if not gate.wait():
            raise SystemExit
        return take_step(*arguments, **options)

    training.train_step = take_gated_step


def list_words(setting: Setting) -> list[str]:
    """The arguments of `pretrain_gpt.py`."""
    values = {
        "num-layers": setting.layers,
        "hidden-size": setting.dim,
        "ffn-hidden-size": setting.ffn,
        "num-attention-heads": setting.heads,
        "seq-length": setting.sequence,
        "max-position-embeddings": setting.sequence,
        "norm-epsilon": setting.norm_epsilon,
        "rotary-base": int(setting.rope_theta),
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": setting.vocab - 1,  # NullTokenizer adds one
        "make-vocab-size-divisible-by": 1,
        "micro-batch-size": setting.batch,
        "global-batch-size": setting.batch,
        "train-iters": NUM_STEPS,
        "lr": LEARNING_RATE,
        "lr-decay-style": "constant",
        "adam-beta1": BETAS[0],
        "adam-beta2": BETAS[1],
        "adam-eps": EPSILON,
        "weight-decay": WEIGHT_DECAY,
        "clip-grad": CLIP,
        "seed": SEED,
        "eval-iters": 0,
        "eval-interval": NUM_STEPS,
        "log-interval": 1,
        "num-workers": 0,
    }
    switches = ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--mock-data"]
    return [*(word for name, value in values.items() for word in (f"--{name}", str(value))), *switches, *CPU_ARGUMENTS]


if __name__ == "__main__":
    main()
