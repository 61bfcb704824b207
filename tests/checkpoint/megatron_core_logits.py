"""Load a torch_dist folder by megatron.core on a CPU, and compare logits and a saved copy with ours; run by a test."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def avoid_cuda() -> None:
    """Functions of torch.cuda that megatron.core calls on any machine."""
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def main(folder: str) -> None:
    avoid_cuda()
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from primus.checkpoint.convert import compare_weights
    from primus.checkpoint.formats.open import open_checkpoint
    from primus.frameworks.native import compute_logits
    from primus.models.counts import head_dim

    opened = open_checkpoint(folder)
    spec = opened.spec
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            num_attention_heads=spec.num_attention_heads,
            num_query_groups=spec.num_query_groups,
            kv_channels=head_dim(spec),
            ffn_hidden_size=spec.ffn_hidden_size,
            normalization="RMSNorm",
            layernorm_epsilon=spec.norm_epsilon,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=spec.vocab_size,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        wanted = {name: value for name, value in model.sharded_state_dict().items() if "_extra_state" not in name}
        loaded = dist_checkpointing.load(wanted, str(opened.found.folder), strict=StrictHandling.RAISE_ALL)
        state = model.state_dict()
        found = model.load_state_dict({name: loaded[name] for name in loaded if name in state}, strict=False)
        tokens = torch.randint(spec.vocab_size, (1, 16))
        mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
        with torch.no_grad():
            theirs = model(tokens, torch.arange(16)[None], mask)
        ours = compute_logits(spec, opened.weights, tokens)
        saved = Path(scratch) / "saved"
        saved.mkdir()
        dist_checkpointing.save(model.sharded_state_dict(), str(saved))
        differences = compare_weights(opened.weights, open_checkpoint(str(saved), spec).weights)
        result = {
            "missing": [name for name in found.missing_keys if "_extra_state" not in name],
            "difference": float((ours - theirs).abs().max() / ours.abs().max()),
            "saved_again_equal": not differences,
        }
        dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
