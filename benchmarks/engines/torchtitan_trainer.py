"""torchtitan's own `Trainer`, in turns: `torchrun -m engines.torchtitan_trainer SETTING_JSON`.

The parts that it gets are those that it needs without a data set, a tokenizer and a GPU; the loop is its own.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from engines import torchtitan as shape  # names the CPU before torchtitan asks for the device
from engines.gate import StepGate
from engines.setting import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Setting
from engines.worker import make_batches

for name, answer in {
    "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 40),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
}.items():
    setattr(torch.cpu, name, getattr(torch.cpu, name, answer))

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.configs import CompileConfig, DebugConfig  # noqa: E402
from torchtitan.distributed import utils as distributed_utils  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class NoTokenizer(BaseTokenizer):
    """The trainer builds one."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No options."""

    def __init__(self, config: Config, *, tokenizer_path: str, **options: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **options: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **options: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class TurnsLoader(BaseDataLoader):
    """The batches of the benchmark, one when a step is asked for."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No options."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        gate, batches = StepGate(), itertools.cycle(make_batches(SETTING))
        while gate.wait():
            tokens, targets = next(batches)
            yield {"input": tokens}, targets

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is saved."""


def main() -> None:
    # torch 2.13 cannot change the time-out of a group, which torchtitan does after the first step.
    distributed_utils.set_pg_timeouts = lambda *arguments, **options: None
    init_logger()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_config(SETTING, folder).build()
        try:
            trainer.train()
        finally:
            trainer.close()
            torch.distributed.destroy_process_group()


def build_config(setting: Setting, folder: str) -> Trainer.Config:
    adam = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    llama3.get_attention_config = lambda backend: shape.ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=ModelSpec(
            name="benchmark",
            flavor="llama",
            model=shape.make_config(setting),
            parallelize_fn=llama3.parallelize_llama,
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        dump_folder=folder,
        tokenizer=NoTokenizer.Config(),
        dataloader=TurnsLoader.Config(),
        optimizer=OptimizersContainer.Config(
            param_groups=[ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=adam)]
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        loss=CrossEntropyLoss.Config(global_vocab_size=setting.vocab),
        training=TrainingConfig(
            local_batch_size=setting.batch,
            global_batch_size=setting.batch,
            seq_len=setting.sequence,
            steps=1_000_000,
            max_norm=CLIP,
            dtype="float32",
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # the default needs torch 2.14
        activation_checkpoint=None,
        compile=CompileConfig(enable=False),
        debug=DebugConfig(seed=SEED, enable_structured_logging=False),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
    )


SETTING = Setting(**json.loads(sys.argv[1]))

if __name__ == "__main__":
    main()
