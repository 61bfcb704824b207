"""Run one engine: `python -m engines.worker NAME SETTING_JSON`; reads a number of steps a line, answers in JSON lines.

Each answer has the seconds of every step, the last loss and the highest resident memory while the steps ran.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from engines.setting import SEED, Setting

NUM_BATCHES = 4


def main() -> None:
    name, setting, threads = sys.argv[1], Setting(**json.loads(sys.argv[2])), int(sys.argv[3])
    torch.set_num_threads(threads)
    answers = sys.stdout
    sys.stdout = sys.stderr
    engine = importlib.import_module(f"engines.{name}")
    imported = resident_bytes("VmRSS")
    step, parameters = engine.make(setting)
    batches = [tuple(each.to(setting.device) for each in batch) for batch in make_batches(setting)]
    versions = {package: version(package) for package in engine.PACKAGES}
    answer(answers, {"parameters": parameters, "versions": versions, "imported_bytes": imported})
    done = 0
    for line in sys.stdin:
        reset_peak()
        seconds, on_gpu = [], setting.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(int(line)):
            start = time.perf_counter()
            loss = step(*batches[done % NUM_BATCHES])
            seconds.append(time.perf_counter() - start)
            done += 1
        peak = imported + torch.cuda.max_memory_allocated() if on_gpu else resident_bytes("VmHWM")
        # Every step ends with the loss on the host, so the device is done when the time is taken.
        answer(answers, {"seconds": seconds, "loss": loss, "peak_bytes": peak, "watts": read_power(setting.device)})


def read_power(device: str) -> float | None:
    """Power of the GPU after the last step, which NVML or amdsmi averages over the second before."""
    try:
        return torch.cuda.power_draw() / 1000 if device == "cuda" else None
    except (ModuleNotFoundError, RuntimeError):  # neither pynvml nor amdsmi, or a device that does not tell
        return None


def make_batches(setting: Setting) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A few batches that come round again, so that an engine that trains shows a falling loss."""
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randint(0, setting.vocab, (NUM_BATCHES, setting.batch, setting.sequence + 1), generator=generator)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def answer(stream, values: dict) -> None:
    stream.write(json.dumps(values) + "\n")
    stream.flush()


def resident_bytes(field: str) -> int | None:
    """VmRSS or VmHWM of this process (proc(5)); None where there is no /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Let VmHWM begin again at the present size (proc(5), clear_refs 5)."""
    file = Path("/proc/self/clear_refs")
    if file.exists():
        file.write_text("5")


if __name__ == "__main__":
    main()
