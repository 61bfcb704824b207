"""Speed of an engine under primus beside the engine's plain loop in one process: same shape, batch and optimizer.

    python benchmarks/engine_speed.py --python RIVALS/bin/python --engines torchtitan,megatron

Both sides run in turn, whole runs: what counts are the medians over rounds of the ratio in one round. Targets: at least
0.98 of the tokens per second, and at most 1 s longer from the start of the process to the end of the first step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RIVALS = {"torchtitan": "torchtitan", "megatron": "megatron_core", "huggingface": "hugging_face", "native": "native"}
"""Name in benchmarks/engines of the plain loop of each backend."""
VOCAB, TOKENS = 8192, 8 * 256
OVERRIDES = {
    "num_layers": 8,
    "hidden_size": 256,
    "ffn_hidden_size": 768,
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "mock_data": True,
    "device": "cpu",
    "bf16": False,
    "compile": False,
    "seq_length": 256,
    "micro_batch_size": 8,
    "lr": 3.0e-4,
    "lr_decay_style": "constant",
    "disable_tensorboard": True,
    "disable_last_saving": True,
    "sample_tokens": 0,
}


def main() -> None:
    options = parse(sys.argv[1:])
    results = {}
    for engine in options.engines.split(","):
        rounds = [measure(engine, options) for _ in range(options.rounds)]
        results[engine] = {
            "speed_ratio": statistics.median(each["plain_step_s"] / each["primus_step_s"] for each in rounds),
            "longer_to_first_step_s": statistics.median(
                each["primus_first_step_s"] - each["plain_first_step_s"] for each in rounds
            ),
            "rounds": rounds,
        }
        summary = results[engine]
        print(
            f"{engine}: {summary['speed_ratio']:.3f} of the plain loop's tokens/s, first step"
            f" {summary['longer_to_first_step_s']:+.1f} s",
            flush=True,
        )
    record = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "steps": options.steps,
        "engines": results,
    }
    output = Path(options.output or HERE / "results" / f"engine_speed-{options.machine}.json")
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {output}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="torchtitan,megatron", help=f"of {', '.join(RIVALS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4, help="steps at the beginning that do not count")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the engines")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", help="where the record goes, instead of results/")
    return parser.parse_args(arguments)


def measure(engine: str, options: argparse.Namespace) -> dict[str, float]:
    """One round: first primus, then the plain loop."""
    ours, theirs = run_primus(engine, options), run_plain(engine, options)
    return {
        "primus_first_step_s": ours[0],
        "primus_step_s": statistics.median(ours[1]),
        "plain_first_step_s": theirs[0],
        "plain_step_s": statistics.median(theirs[1]),
    }


def run_primus(engine: str, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Seconds to the end of the first step, and of each step after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        module = {"framework": engine, "model": "tiny", "overrides": {**OVERRIDES, "train_iters": options.steps}}
        file = Path(folder) / "speed.yaml"
        file.write_text(json.dumps({"exp_name": "speed", "workspace": folder, "modules": {"pre_trainer": module}}))
        command = [sys.executable, "-m", "primus", "direct", "--nproc", "1", "--", "train", "pretrain"]
        started = time.time()
        subprocess.run([*command, "--config", str(file)], check=True, stdout=subprocess.DEVNULL)
        events = next(Path(folder).glob("speed/2*/events.jsonl")).read_text().splitlines()
    steps = [event for event in map(json.loads, events) if event["kind"] == "step"]
    return steps[0]["time"] - started, [step["step_time_s"] for step in steps[options.warmup :]]


def run_plain(engine: str, options: argparse.Namespace) -> tuple[float, list[float]]:
    """The same of benchmarks/engines/worker.py."""
    setting = json.dumps({"vocab": VOCAB, "bf16": False, "compile": False})
    search = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]))
    started = time.time()
    process = subprocess.Popen(
        [options.python, "-W", "ignore", "-m", "engines.worker", RIVALS[engine], setting, str(os.cpu_count())],
        cwd=HERE,
        env=os.environ | {"PYTHONPATH": search},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        process.stdin.write("1\n")
        process.stdin.flush()
        answers = [process.stdout.readline(), process.stdout.readline()]
        if not answers[1]:
            raise SystemExit(f"{engine}: the plain loop ended with {process.wait()}; its error is above")
        first_step_s = time.time() - started
        process.stdin.write(f"{options.steps - 1}\n")
        process.stdin.flush()
        seconds = json.loads(process.stdout.readline())["seconds"]
    finally:
        process.stdin.close()
        process.wait(timeout=30)
    return first_step_s, seconds[options.warmup - 1 :]


if __name__ == "__main__":
    main()
