"""Training speed and memory of the native backend beside other engines: same shape, batch and optimizer, interleaved.

    python benchmarks/train_speed.py --python RIVALS/bin/python --rounds 7

Each engine is a process of its own that stays alive; in every round each one takes a few steps in turn, so that
whatever else the machine does meets all of them. What counts are the medians over rounds of the ratios in one round.
Rivals: pip install transformers litgpt megatron-core torchtitan triton (beside the torch that native uses).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from engines.setting import Setting

HERE = Path(__file__).parent
EAGER = ("native", "hugging_face", "litgpt", "torchtitan", "megatron_core")
COMPILED = ("native+compile", "hugging_face+compile", "litgpt+compile", "torchtitan+compile")
DTYPES = ("fp32", "bf16")
EXPERT_KERNELS = {"hugging_face_grouped": "grouped_mm"}
"""Further engines of the model with experts, by how transformers computes them."""
LLAMA_8B = {"dim": 4096, "heads": 32, "groups": 8, "ffn": 14336, "sequence": 8192, "batch": 1, "rope_theta": 5e5}
TINY = {"dim": 64, "layers": 2, "heads": 4, "groups": 2, "ffn": 96, "sequence": 64, "batch": 2}
MODELS: dict[str, dict] = {
    "dense": {},
    "experts": {"layers": 4, "ffn": 512, "experts": 8},
    # For a GPU: Llama 3.1 8B and Mixtral 8x7B with as many layers as their fp32 masters and moments leave room for.
    "llama-8b": LLAMA_8B | {"layers": 8},
    "mixtral": LLAMA_8B | {"layers": 2, "experts": 8, "rope_theta": 1e6},
    "tiny": TINY,
    "tiny-experts": TINY | {"experts": 4},
}
"""What differs from `engines.setting.Setting`."""
EXPERT_ENGINES = (
    *("native", "hugging_face", "hugging_face_grouped", "torchtitan", "megatron_core"),
    *("native+compile", "hugging_face+compile", "hugging_face_grouped+compile", "torchtitan+compile"),
)


def main() -> None:
    options = parse(sys.argv[1:])
    cells = []
    for vocab in options.vocab:
        for dtype in options.dtype:
            cell = measure(vocab, dtype, options)
            print(table(cell), flush=True)
            cells.append(cell)
    record = {
        "model": options.model,
        "machine": machine(options.threads) | {"device": name_device(options)},
        "steps_in_a_round": options.steps,
        "cells": cells,
    }
    name = "train_speed" if options.model == "dense" else f"train_speed-{options.model}"
    output = Path(options.output or HERE / "results" / f"{name}-{options.machine}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {output}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--engines", help="names, with +compile where wanted; all that have the model")
    parser.add_argument("--vocab", default="8192,32000", help="vocabulary sizes")
    parser.add_argument("--dtype", default=",".join(DTYPES), help="fp32, bf16 (with fp32 master weights)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: also AMD's GPUs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of each engine in a round")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each engine before the first round")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each engine")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the rivals")
    parser.add_argument("--environments", type=Path, help="folder of primus' environments of engines, instead")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", help="where the record goes, instead of results/")
    options = parser.parse_args(arguments)
    known = EXPERT_ENGINES if "experts" in MODELS[options.model] else EAGER + COMPILED
    options.engines = options.engines.split(",") if options.engines else list(known)
    options.vocab = [int(size) for size in options.vocab.split(",")]
    options.dtype = options.dtype.split(",")
    unknown = set(options.engines) - set(known) or set(options.dtype) - set(DTYPES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; valid: {', '.join(known + DTYPES)}")
    return options


def measure(vocab: int, dtype: str, options: argparse.Namespace) -> dict:
    """All engines on one vocabulary and dtype; a dictionary of results by engine."""
    workers = {name: Worker(name, vocab, dtype, options) for name in options.engines}
    try:
        facts = {name: worker.read() for name, worker in workers.items()}
        warm = {name: worker.run(options.warmup) for name, worker in workers.items()}
        rounds = [{name: worker.run(options.steps) for name, worker in workers.items()} for _ in range(options.rounds)]
    finally:
        for worker in workers.values():
            worker.stop()
    setting = Setting(vocab=vocab, bf16=dtype == "bf16", compile=False, **MODELS[options.model])
    tokens = setting.batch * setting.sequence
    seconds = {name: [statistics.median(turn[name]["seconds"]) for turn in rounds] for name in workers}
    results = {}
    for name in workers:
        peak = max(turn[name]["peak_bytes"] or 0 for turn in rounds)
        results[name] = {
            "tokens_per_second": round(tokens / statistics.median(seconds[name])),
            "native_is_faster_by": {
                ours: round(statistics.median(t / n for t, n in zip(seconds[name], seconds[ours], strict=True)), 3)
                for ours in ("native", "native+compile")
                if ours in workers
            },
            "step_memory_mib": round((peak - (facts[name]["imported_bytes"] or 0)) / 2**20),
            "watts": rounds[-1][name].get("watts"),
            "start_seconds": round(warm[name]["seconds"][0], 1),
            "loss": round(rounds[-1][name]["loss"], 4),
            "parameters": facts[name]["parameters"],
            "versions": facts[name]["versions"],
            "round_seconds": [round(value, 4) for value in seconds[name]],
        }
    return {"vocab": vocab, "dtype": dtype, "engines": results}


class Worker:
    """One engine in its own process (engines/worker.py)."""

    def __init__(self, name: str, vocab: int, dtype: str, options: argparse.Namespace) -> None:
        engine, _, compiled = name.partition("+")
        values = {"vocab": vocab, "bf16": dtype == "bf16", "compile": bool(compiled)} | MODELS[options.model]
        values["device"] = options.device
        if engine in EXPERT_KERNELS:
            engine, values["expert_kernel"] = "hugging_face", EXPERT_KERNELS[engine]
        setting = json.dumps(values)
        python = find_python(engine, options)
        search = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        self.name = name
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "engines.worker", engine, setting, str(options.threads)],
            cwd=HERE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, steps: int) -> dict:
        """Take `steps` steps while all other engines wait."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}; its error is above")
        return json.loads(line)

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


ENVIRONMENTS = {"hugging_face": "huggingface", "megatron_core": "megatron", "torchtitan": "torchtitan"}


def find_python(engine: str, options: argparse.Namespace) -> str:
    if engine == "native":
        return sys.executable
    if options.environments and engine in ENVIRONMENTS:
        return str(options.environments / ENVIRONMENTS[engine] / "bin" / "python")
    return options.python


def table(cell: dict) -> str:
    """The cell as Markdown; a ratio above 1 says how much faster native is than that engine."""
    lines = [
        f"\nvocabulary {cell['vocab']}, {cell['dtype']}\n",
        "| engine | tokens/s | native is faster by | native+compile is faster by | step memory MiB | loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in cell["engines"].items():
        ratios = [result["native_is_faster_by"].get(ours, "") for ours in ("native", "native+compile")]
        lines.append(
            f"| {name} | {result['tokens_per_second']:,} | {ratios[0]} | {ratios[1]} "
            f"| {result['step_memory_mib']:,} | {result['loss']} |"
        )
    return "\n".join(lines)


def machine(threads: int) -> dict:
    """What the figures depend on: date, processor, threads, interpreter, other work."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "threads": threads,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def name_device(options: argparse.Namespace) -> str:
    if options.device == "cpu":
        return "cpu"
    import torch

    return f"{torch.cuda.get_device_name()} (torch {torch.__version__})"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    fields = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    extensions = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in fields.get("flags", "").split()]
    return f"{fields.get('model name', platform.processor())} ({', '.join(extensions) or 'no AVX-512'})"


if __name__ == "__main__":
    main()
