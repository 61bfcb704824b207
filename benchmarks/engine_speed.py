"""Speed of an engine under primus beside the engine's own loop in one process: same shape, batch and optimizer.

    python benchmarks/engine_speed.py --engines torchtitan,megatron

The rivals are torchtitan's own `Trainer` under torchrun, MaxText's own program, and plain loops over megatron-core and
transformers. `megatron_lm` is the backend `megatron` on a checkout of Megatron-LM, which PRIMUS_MEGATRON_PATH names,
and its rival that checkout's own `pretrain()`. In a round both sides start, one after the other, and then take blocks
of steps in turns, so that whatever else the machine does meets both. What counts are the medians of the ratios of two
neighboring blocks, and of the differences of the times from the start of the command to the end of the first step.
Targets: at least 0.98 of the tokens per second, and at most 1 s longer to the first step. The ratio of the processor
times of the training processes is recorded as well: it depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engines.gate import ANSWERS, FOLDER_VARIABLE, REQUESTS

from primus import registry
from primus.engines.choice import choose_engine
from primus.framework import FRAMEWORKS

HERE = Path(__file__).parent
VOCAB = 8192
SETTING = json.dumps({"vocab": VOCAB, "bf16": False, "compile": False})
"""Of benchmarks/engines/setting.py."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
RIVALS = {
    "torchtitan": (*TORCHRUN, "-m", "engines.torchtitan_trainer", SETTING),
    "megatron": ("-m", "engines.plain_loop", "megatron_core", SETTING),
    "huggingface": ("-m", "engines.plain_loop", "hugging_face", SETTING),
    "megatron_lm": (*TORCHRUN, "-m", "engines.megatron_lm", SETTING),
    "maxtext": ("-m", "engines.maxtext_trainer", SETTING),
    "native": ("-m", "engines.plain_loop", "native", SETTING),
}
"""Arguments of the interpreter that start the loop without primus, by backend."""
CHECKOUT_VARIABLE = "PRIMUS_MEGATRON_PATH"
OTHER_NAMES = {"megatron_lm": "megatron"}
"""Backends that have another name than here."""
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
    "train_iters": 1_000_000,
    "lr": 3.0e-4,
    "lr_decay_style": "constant",
    "disable_last_saving": True,
    "save_interval": None,
    "eval_interval": None,
    "eval_iters": 0,
    "sample_tokens": 0,
    "callbacks": ["turns"],
}
"""The same shape, batch and optimizer, with everything that a run reports."""
CACHE_VARIABLE = "ENGINE_SPEED_CACHE"
"""Variable with the folder where JAX keeps what it has compiled: empty at first, and the same for both sides."""
PATIENCE_S = 300.0
"""Longest wait for an answer."""


def main() -> None:
    options = parse(sys.argv[1:])
    results = {}
    for engine in options.engines.split(","):
        with tempfile.TemporaryDirectory() as cache:
            rounds = [measure(engine, number, options, cache) for number in range(options.rounds)]
        results[engine] = summarize(rounds)
        summary = results[engine]
        print(
            f"{engine}: {summary['speed_ratio']:.3f} of its own loop's tokens/s (by processor time"
            f" {summary['cpu_ratio']:.3f}), first step {summary['longer_to_first_step_s']:+.1f} s"
            f" ({summary['more_cpu_to_first_step_s']:+.1f} s of processor time)",
            flush=True,
        )
    record = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "steps_of_a_block": options.steps,
        "engines": results,
    }
    output = Path(options.output or HERE / "results" / f"engine_speed-{options.machine}.json")
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {output}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="torchtitan,megatron", help=f"of {', '.join(RIVALS)}")
    parser.add_argument("--rounds", type=int, default=4, help="starts of both sides")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each side in a round")
    parser.add_argument("--steps", type=int, default=3, help="steps of a block")
    parser.add_argument("--python", help="interpreter that has the engine; that of the engine's environment if omitted")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", help="where the record goes, instead of results/")
    return parser.parse_args(arguments)


def measure(engine: str, number: int, options: argparse.Namespace, cache: str) -> dict[str, object]:
    """One round; the side that is first alternates."""
    with tempfile.TemporaryDirectory() as folder:
        environ = find_environment(engine) | {CACHE_VARIABLE: cache}
        commands = {"primus": make_command(engine, Path(folder), cache), "own": find_rival(engine, options.python)}
        order = list(commands)[:: 1 if number % 2 else -1]
        with start(commands[order[0]], environ) as first, start(commands[order[1]], environ) as second:
            sides = {order[0]: first, order[1]: second}
            for side in sides.values():
                side.take(options.steps)  # warms up
            blocks = [{name: sides[name].take(options.steps) for name in order} for _ in range(options.blocks)]
            return {"first_step": {name: side.first_step for name, side in sides.items()}, "blocks": blocks}


def summarize(rounds: Sequence[dict]) -> dict[str, object]:
    """The medians that count, and all rounds."""
    blocks = [block for each in rounds for block in each["blocks"]]
    starts = [each["first_step"] for each in rounds]
    return {
        **{
            name: statistics.median(block["own"][key] / block["primus"][key] for block in blocks)
            for name, key in (("speed_ratio", "seconds"), ("cpu_ratio", "cpu_seconds"))
        },
        **{
            name: statistics.median(each["primus"][key] - each["own"][key] for each in starts)
            for name, key in (("longer_to_first_step_s", "seconds"), ("more_cpu_to_first_step_s", "cpu_seconds"))
        },
        "rounds": rounds,
    }


def find_environment(engine: str) -> dict[str, str]:
    """Variables of both sides: the modules of the benchmark, and its callback.

    Raises:
        SystemExit: No variable names the checkout.
    """
    search = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    checkout = os.environ.get(CHECKOUT_VARIABLE)
    if (engine == "megatron_lm") != bool(checkout):
        raise SystemExit(f"set {CHECKOUT_VARIABLE} for megatron_lm, and unset it for other engines")
    search.insert(2, checkout or "")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "PRIMUS_PLUGINS": str(HERE / "engines" / "plug_ins"),
    }


def make_command(engine: str, folder: Path, cache: str) -> list[str]:
    """Train by primus."""
    overrides = OVERRIDES
    if engine == "maxtext":
        overrides = OVERRIDES | {"compile": "auto", "backend_args": {"jax_cache_dir": cache}}
    module = {"framework": OTHER_NAMES.get(engine, engine), "model": "tiny", "overrides": overrides}
    file = folder / "speed.yaml"
    # JSON is YAML.
    file.write_text(json.dumps({"exp_name": "speed", "workspace": str(folder), "modules": {"pre_trainer": module}}))
    return [sys.executable, "-m", "primus", "direct", "--nproc", "1", "--", "train", "pretrain", "--config", str(file)]


def find_rival(engine: str, python: str | None) -> list[str]:
    """The engine's own loop, by the interpreter that primus uses for the engine."""
    choice = choose_engine(
        tuple(registry.load_plug_in(FRAMEWORKS, OTHER_NAMES.get(engine, engine)).ENGINES), os.environ
    )
    return [python or (choice.python if choice else sys.executable), "-W", "ignore", *RIVALS[engine]]


class Side:
    """A process that takes steps when it is told to.

    Args:
        process: It.
        requests: Pipe for numbers of steps.
        answers: Pipe with the seconds that they took.
        started: When the process was started.
    """

    def __init__(self, process: subprocess.Popen, requests: int, answers: int, started: float) -> None:
        self._process, self._requests, self._answers = process, requests, answers
        self._unread = b""
        answer = self._read_answer()
        self.first_step = {
            "seconds": round(answer["time"] - started, 2),
            "cpu_seconds": round(answer["all_cpu_seconds"], 2),
        }
        """From the start of the command; processor time of the training process alone."""

    def take(self, steps: int) -> dict[str, float]:
        """Take steps; the seconds and the processor time that they took."""
        os.write(self._requests, f"{steps}\n".encode())
        answer = self._read_answer()
        return {key: round(answer[key], 4) for key in ("seconds", "cpu_seconds")}

    def _read_answer(self) -> dict[str, float]:
        ends = time.monotonic() + PATIENCE_S
        while b"\n" not in self._unread:
            if self._process.poll() is not None:
                raise SystemExit(f"{' '.join(self._process.args)} ended with {self._process.returncode}")
            if time.monotonic() > ends:
                raise SystemExit(f"{' '.join(self._process.args)} took no step in {PATIENCE_S:.0f} s")
            if select.select([self._answers], [], [], 1.0)[0]:
                self._unread += os.read(self._answers, 4096)
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


@contextmanager
def start(command: list[str], environ: dict[str, str]) -> Iterator[Side]:
    """Start a side, and wait for its first step; ends it afterwards."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        pipes = [os.path.join(folder, name) for name in (REQUESTS, ANSWERS)]
        for pipe in pipes:
            os.mkfifo(pipe)
        # Opened for both directions, so that neither side waits for the other to open it.
        requests, answers = (os.open(pipe, os.O_RDWR) for pipe in pipes)
        started = time.time()
        process = subprocess.Popen(command, cwd=HERE, env=environ | {FOLDER_VARIABLE: folder}, stdout=log, stderr=log)
        try:
            yield Side(process, requests, answers, started)
        except SystemExit:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            os.write(requests, b"0\n")
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(requests)
            os.close(answers)


if __name__ == "__main__":
    main()
