"""Losses and gradient norms of all engines on small models, by `compare engines`: same weights, tokens and schedule.

    python benchmarks/engines_parity.py --engines native,torchtitan,megatron,jax,huggingface

Llama (scaled rope), Qwen2.5 and Qwen3, tied and untied, in fp32 on CPUs, one process; Llama on two processes, which
share batch, matrices (TP), sequence (TP+SP) or layers (PP); the shapes of Mixtral and Qwen3-MoE on torchtitan and
megatron, which train them. An engine that is not installed (`./primus-cli engines`) is recorded as such, and so is one
that does not have a layout, with its reason.

The learning rate is one at which training is stable. At 3e-3 the gradient norm of the tied Llama jumps at step 12, and
rounding is amplified a hundredfold: there native and jax both are 7e-5 from a run in float64, on different sides.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SHAPE = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 352,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
KINDS = {
    "llama": {
        "rope_type": "llama3",
        "rotary_scaling_factor": 8.0,
        "original_max_position_embeddings": 32,
        "rotary_base": 500000.0,
    },
    "llama-tied": {"untie_embeddings_and_output_weights": False},
    "qwen2.5": {"add_qkv_bias": True, "norm_epsilon": 1e-6, "rotary_base": 1e6},
    "qwen2.5-tied": {
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
        "norm_epsilon": 1e-6,
        "rotary_base": 1e6,
    },
    "qwen3": {"qk_layernorm": True, "kv_channels": 32, "norm_epsilon": 1e-6, "rotary_base": 1e6},
    "qwen3-tied": {
        "qk_layernorm": True,
        "kv_channels": 32,
        "untie_embeddings_and_output_weights": False,
        "norm_epsilon": 1e-6,
        "rotary_base": 1e6,
    },
    "mixtral": {
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 96,
        "moe_router_pre_softmax": False,
    },
    "qwen3-moe": {
        "num_experts": 16,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 48,
        "moe_router_norm_topk_prob": True,
        "qk_layernorm": True,
        "kv_channels": 32,
        "norm_epsilon": 1e-6,
        "rotary_base": 1e6,
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "": (1, {}),
    "data": (2, {}),
    "TP": (2, {"tensor_model_parallel_size": 2}),
    "TP+SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP": (2, {"pipeline_model_parallel_size": 2}),
}
"""How processes share a model, by name: their number, and the settings."""
LAYOUT_ENGINES = ("torchtitan", "megatron", "jax")
"""Those that share more than the batch; the first is the reference, and is compared with native in one process."""
EXPERT_ENGINES = ("torchtitan", "megatron")
"""Those that train mixtures of experts; the first is the reference."""
SETTINGS = {
    "mock_data": True,
    "device": "cpu",
    "bf16": False,
    "seq_length": 64,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "lr": 1.0e-3,
    "min_lr": 1.0e-4,
    "lr_warmup_iters": 5,
    "lr_decay_iters": 20,
    "disable_tensorboard": True,
}


def main() -> None:
    options = parse(sys.argv[1:])
    output = Path(options.output or HERE / "results" / f"engines_parity-{options.machine}.json")
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            for layout in LAYOUTS if kind == "llama" and options.two else ("",):
                cases.append(compare(kind, layout, options, Path(folder)))
                alone = next(case for case in cases if case["model"] == kind)
                cases[-1]["difference_from_one_process"] = compute_difference(cases[-1]["losses"], alone["losses"])
                print(table(cases[-1]), flush=True)
                write_record(cases, options, output)
    print(f"written: {output}")


def write_record(cases: list[dict], options: argparse.Namespace, output: Path) -> None:
    """The record so far; a long run that is stopped leaves what it has."""
    record = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "steps": options.steps,
        "cases": cases,
    }
    output.write_text(json.dumps(record, indent=1) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="native,torchtitan,megatron,jax,huggingface")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-two", dest="two", action="store_false", help="leave out layouts of two processes")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", help="where the record goes, instead of results/")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",")
    return options


def compute_difference(losses: list[float], others: list[float]) -> float | None:
    """Largest difference of two runs' losses; None if one of them took no step."""
    return max((abs(one - other) for one, other in zip(losses, others, strict=False)), default=None)


def compare(kind: str, layout: str, options: argparse.Namespace, folder: Path) -> dict:
    """The comparison of one model in one layout."""
    nproc, parallel = LAYOUTS[layout]
    overrides = {**SHAPE, **KINDS[kind], **SETTINGS, **parallel}
    module = {"framework": "native", "model": "tiny", "overrides": overrides}
    experiment = {"exp_name": kind, "workspace": str(folder), "modules": {"pre_trainer": module}}
    file = folder / f"{kind}.yaml"
    file.write_text(json.dumps(experiment))  # JSON is YAML
    possible = EXPERT_ENGINES if "num_experts" in KINDS[kind] else LAYOUT_ENGINES if parallel else ()
    engines = [name for name in options.engines.split(",") if name in possible or not possible]
    words = ["--config", str(file), "--engines", ",".join(engines), "--steps", str(options.steps), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "primus", "direct", "--nproc", str(nproc), "--", "compare", "engines", *words],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)
    kept = ("engine", "problem", "steps", "first_loss_difference", "max_loss_difference", "max_grad_norm_difference")
    engines = [{key: each[key] for key in (*kept, "first_step_above", "same_tokens")} for each in found["engines"]]
    first = found["reference_steps"]
    return {
        "model": kind,
        "processes": nproc,
        "layout": layout,
        "exit_code": done.returncode,
        "reference": found["reference"],
        "losses": first["losses"] if first else [],
        "engines": engines,
    }


def table(case: dict) -> str:
    place = f"{case['processes']} process(es) {case['layout']}, against {case['reference']}"
    lines = [
        f"\n{case['model']}, {place} (from one process: {case['difference_from_one_process']})\n",
        "| engine | step 1 | largest | grad norm | above tolerance | same tokens |",
        "|---|---|---|---|---|---|",
    ]
    for each in case["engines"]:
        if not each["steps"]:
            lines.append(f"| {each['engine']} | {each['problem'].splitlines()[0]} | | | | |")
            continue
        first, most, norm = (
            f"{each[key]:.1e}" for key in ("first_loss_difference", "max_loss_difference", "max_grad_norm_difference")
        )
        above = each["first_step_above"] or "no"
        lines.append(f"| {each['engine']} | {first} | {most} | {norm} | {above} | {each['same_tokens']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
