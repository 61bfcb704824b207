"""All that a machine with a GPU is needed for, in parts of at most nine minutes, without a network.

    python benchmarks/device_day.py --device cuda --environments .venv/engines --output results-gpu
    python benchmarks/device_day.py --device cpu        # the same with tiny shapes, so that it works the first time

Each part is a command; its output and results are files in the output folder, and summary.json says which parts failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
LIMIT_S = 540.0
"""Of one part."""
PRIMUS = (sys.executable, "-m", "primus", "direct", "--")


def main() -> None:
    options = parse(sys.argv[1:])
    options.output.mkdir(parents=True, exist_ok=True)
    commands = list_commands(options)
    results = [run(part, commands[part], options) for part in options.parts or commands]
    (options.output / "summary.json").write_text(json.dumps(results, indent=1) + "\n")
    for result in results:
        print(f"{result['part']:<12} {result['state']:<12} {result['seconds']:>6.0f} s  {result['log']}")
    raise SystemExit(any(result["state"] != "ok" for result in results))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts to run; all if none is named")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cuda: also AMD's GPUs")
    parser.add_argument(
        "--environments", type=Path, help="folder of the engines' environments; without it native alone"
    )
    parser.add_argument("--output", type=Path, default=Path("output/device-day"))
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.parts) - set(list_commands(options)))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; valid: {', '.join(list_commands(options))}")
    return options


def list_commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each part."""
    on_gpu, folder = options.device == "cuda", options.output.absolute()
    python, device = sys.executable, ["--device", options.device]
    rivals = options.environments is not None

    def train(model: str, engines: str) -> list[str]:
        sizes = ["--dtype", "bf16", "--vocab", "128256", "--rounds", "5"]
        if not on_gpu:
            sizes = ["--dtype", "fp32", "--vocab", "512", "--rounds", "1"]
        environments = ["--environments", str(options.environments)] if rivals else []
        named = ["--model", model, "--engines", engines, "--output", str(folder / f"{model}.json")]
        return [python, str(HERE / "train_speed.py"), *device, *sizes, *named, *environments]

    dense = "native+compile,torchtitan+compile,hugging_face+compile" if rivals else "native+compile"
    experts = "native+compile,torchtitan,hugging_face_grouped" if rivals else "native"
    few = [] if on_gpu else ["--quick", "--tests", "sanity"]
    short = [] if on_gpu else ["--duration", "0.05", "--size", "64"]
    run = ["--exp_name", "device-day", "--workspace", str(folder), "--train_iters", "12", "--kernel_trial", "always"]
    quickstart = str(ROOT / "examples" / "quickstart.yaml")
    return {
        "tests": [python, "-m", "pytest", "-q", str(ROOT / "tests"), "-m", "gpu"],
        "kernels": [python, str(HERE / "device_kernels.py"), *device, "--output", str(folder / "kernels.json")],
        "dense": train("llama-8b" if on_gpu else "tiny", dense),
        "experts": train("mixtral" if on_gpu else "tiny-experts", experts),
        "preflight": [*PRIMUS, "preflight", "--gpu", "--perf", *few, "--report", str(folder)],
        "products": [*PRIMUS, "benchmark", "gemm", *device, *short, "--output", str(folder / "gemm.json")],
        "profile": [*PRIMUS, "train", "pretrain", "--config", quickstart, "--profile", "true", *run],
    }


def run(part: str, command: list[str], options: argparse.Namespace) -> dict:
    """Run a part for at most LIMIT_S, its output in a file."""
    log, started = options.output / f"{part}.log", time.monotonic()
    search = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environ = os.environ | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        try:
            code = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=ROOT, timeout=LIMIT_S, check=False
            ).returncode
            # pytest has a code of its own for no test, as on a machine without a GPU.
            state = "ok" if code == 0 or (part == "tests" and code == 5) else f"failed: {code}"
        except subprocess.TimeoutExpired:
            state = "too long"
    print(f"{part}: {state}", flush=True)
    return {
        "part": part,
        "state": state,
        "seconds": round(time.monotonic() - started, 1),
        "log": str(log),
        "command": command,
    }


if __name__ == "__main__":
    main()
