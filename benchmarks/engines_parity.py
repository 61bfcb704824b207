"""Losses and gradient norms of all engines on small models, by `compare engines`: same weights, tokens and schedule.

    python benchmarks/engines_parity.py --engines native,torchtitan,megatron,jax,huggingface

Llama (scaled rope, tied and untied), Qwen2.5 and Qwen3 in fp32 on CPUs, one process, and Llama on two; the shapes of
Mixtral and Qwen3-MoE on torchtitan and megatron, which train them. An engine that is not installed (`./primus-cli
engines`) is recorded as such.

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
    "qwen2.5": {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False, "norm_epsilon": 1e-6},
    "qwen3": {"qk_layernorm": True, "kv_channels": 32, "norm_epsilon": 1e-6, "rotary_base": 1e6},
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
            for nproc in (1, 2) if kind == "llama" and options.two else (1,):
                cases.append(compare(kind, nproc, options, Path(folder)))
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
    parser.add_argument("--no-two", dest="two", action="store_false", help="leave out two processes")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", help="where the record goes, instead of results/")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",")
    return options


def compare(kind: str, nproc: int, options: argparse.Namespace, folder: Path) -> dict:
    """The comparison of one model."""
    module = {"framework": "native", "model": "tiny", "overrides": {**SHAPE, **KINDS[kind], **SETTINGS}}
    experiment = {"exp_name": kind, "workspace": str(folder), "modules": {"pre_trainer": module}}
    file = folder / f"{kind}.yaml"
    file.write_text(json.dumps(experiment))  # JSON is YAML
    engines = options.engines.split(",")
    if "num_experts" in KINDS[kind]:
        engines = [name for name in EXPERT_ENGINES if name in engines]
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
        "exit_code": done.returncode,
        "reference": found["reference"],
        "losses": first["losses"] if first else [],
        "engines": engines,
    }


def table(case: dict) -> str:
    lines = [
        f"\n{case['model']}, {case['processes']} process(es), against {case['reference']}\n",
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
