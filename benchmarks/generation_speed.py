"""Speed of generation beside transformers: same weights, prompts and tokens, in turns.

    .venv/engines/huggingface/bin/python benchmarks/generation_speed.py

Both continue 32 prompts of unequal lengths greedily by 64 tokens. What counts is the median of the ratios of rounds,
with its 95 % interval; the program fails if the tokens differ. On a busy machine the ratios of processor time say more:
they lack the time in which others compute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

import torch  # noqa: E402
import transformers  # noqa: E402
from train_speed import machine  # noqa: E402

from primus.checkpoint.family import list_hub_shapes  # noqa: E402
from primus.checkpoint.renaming import HubNames  # noqa: E402
from primus.checkpoint.weights import TensorDict  # noqa: E402
from primus.config.schema import ModelSpec  # noqa: E402
from primus.frameworks.native.engine.model import Transformer, build_model  # noqa: E402
from primus.frameworks.native.engine.post_training.generate import generate  # noqa: E402
from primus.statistics import bootstrap_interval  # noqa: E402

SHAPES = {
    "0.9M": ModelSpec(num_layers=4, hidden_size=128, ffn_hidden_size=352, num_attention_heads=4, vocab_size=512),
    "23M": ModelSpec(num_layers=8, hidden_size=256, ffn_hidden_size=768, num_attention_heads=8, vocab_size=32000),
    "135M": ModelSpec(
        num_layers=30,
        hidden_size=576,
        ffn_hidden_size=1536,
        num_attention_heads=9,
        num_query_groups=3,
        vocab_size=49152,
        untie_embeddings_and_output_weights=False,
    ),
}
"""The model of docs/posttrain.md's measurements, that of train_speed.py, and SmolLM2-135M."""
BATCH, NEW_TOKENS, PROMPT_LENGTHS = 32, 64, (8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record: dict[str, Any] = {
        "machine": machine(options.threads) | {"load_average": os.getloadavg()[0]},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "batch": BATCH,
        "new_tokens": NEW_TOKENS,
        "prompt_lengths": PROMPT_LENGTHS,
        "shapes": {},
    }
    for name in options.shapes:
        record["shapes"][name] = found = compare(SHAPES[name], options.rounds)
        print(name, json.dumps(found), flush=True)
    path = HERE / f"results/generation_speed-{options.machine}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {path}")


def compare(spec: ModelSpec, rounds: int) -> dict[str, Any]:
    model = build_model(spec, "cpu", seed=1)
    theirs = build_theirs(spec, model)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(*PROMPT_LENGTHS, (BATCH,), generator=generator).tolist()
    prompts = [torch.randint(1, spec.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    seconds: dict[str, list[float]] = {"native": [], "transformers": []}
    processor: dict[str, list[float]] = {name: [] for name in seconds}
    for turn in range(-1, rounds):  # the first one warms up
        tokens = {}
        for name in sorted(seconds, reverse=turn % 2 == 0):
            start, busy = time.perf_counter(), time.process_time()
            tokens[name] = (
                [each.tokens for each in generate(model, prompts, NEW_TOKENS).completions]
                if name == "native"
                else generate_theirs(theirs, prompts)
            )
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - busy)
        num_equal = sum(one == other for one, other in zip(*tokens.values(), strict=True))
        assert num_equal == BATCH, f"{BATCH - num_equal} of {BATCH} completions differ"
    interval, of_processor = (
        bootstrap_interval([b / a for a, b in zip(*times.values(), strict=True)], block=None)
        for times in (seconds, processor)
    )
    return {
        "tokens_per_second": {name: round(BATCH * NEW_TOKENS / statistics.median(s)) for name, s in seconds.items()},
        "native_is_faster_by": round(interval.estimate, 3),
        "interval": [round(interval.low, 3), round(interval.high, 3)],
        "by_processor_time": round(of_processor.estimate, 3),
        "interval_of_processor_time": [round(of_processor.low, 3), round(of_processor.high, 3)],
        "cache_mib": round(generate(model, prompts, NEW_TOKENS).cache_bytes / 2**20, 1),
    }


def build_theirs(spec: ModelSpec, model: Transformer) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_query_groups or spec.num_attention_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rotary_base},
        tie_word_embeddings=not spec.untie_embeddings_and_output_weights,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    weights = HubNames(TensorDict({name: weight.detach() for name, weight in model.named_parameters()}), spec, "native")
    missing = theirs.load_state_dict({name: weights.read(name) for name in list_hub_shapes(spec)}, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    return theirs


def generate_theirs(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        found = model.generate(
            padded, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return found[:, longest:].tolist()


if __name__ == "__main__":
    main()
