"""Packed examples do not see each other: the losses of a packed row are those of each example alone."""

from __future__ import annotations

import pytest
from tests.engine_python import run_engine

pytestmark = pytest.mark.engine("megatron")

CODE = """
import torch, torch.distributed as dist
from primus import registry
from primus.patch import PATCHES
registry.load_plug_in(PATCHES, "megatron-core-cpu").apply()
from megatron.core import parallel_state, tensor_parallel
from primus.frameworks.megatron.engine.batches import BatchOptions, build_instruction_batch
from primus.frameworks.megatron.engine.config import build_transformer_config
from primus.frameworks.megatron.engine.model import build_gpt_model
from primus.config.schema import DataConfig, ModelSpec, OptimizerConfig, ParallelConfig, Trainer, TrainingConfig
from primus.config.schema import CheckpointConfig, LoggingConfig

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
shape = ModelSpec(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, vocab_size=64)
trainer = Trainer(
    framework="megatron", model=shape, training=TrainingConfig(bf16=False), data=DataConfig(),
    optimizer=OptimizerConfig(), parallel=ParallelConfig(), checkpoint=CheckpointConfig(), logging=LoggingConfig(),
)
model = build_gpt_model(trainer, build_transformer_config(trainer, "cpu", False, {}), False)
options, cpu = BatchOptions(None, False, None), torch.device("cpu")
torch.manual_seed(0)
tokens = torch.randint(1, 64, (17,))
examples = torch.tensor([1] * 7 + [2] * 6 + [0] * 4)
counted = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0])

def losses(row):
    batch = build_instruction_batch(row[None], options, cpu)
    found = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.targets)
    assert batch.position_ids[0, 0] == 0
    return found[batch.loss_mask.bool()]

packed = torch.stack([tokens, counted, examples])
parts = (slice(0, 7), slice(7, 13))
alone = [torch.stack([tokens[p], counted[p], torch.ones_like(tokens[p])]) for p in parts]
together, apart = losses(packed), torch.cat([losses(row) for row in alone])
assert together.shape == (8,), together.shape
print(float((together - apart).abs().max()))
"""


def test_losses_of_packed_examples_are_those_of_each_alone() -> None:
    # float32 of two layers; leaking attention changes losses by more than 1e-2.
    assert float(run_engine("megatron", CODE).split()[-1]) < 1e-5
