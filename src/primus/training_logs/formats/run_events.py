"""The events of a run folder of primus, which have every step."""

from __future__ import annotations

from pathlib import Path

from primus.runs.events import Event, read_events
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation

NAME = "events"
TITLE = "primus"
FILE = "events.jsonl"
FIELDS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "step_time_s": "step_time_s",
    "tokens_per_s_per_device": "tokens_per_s_per_device",
    "tflops_per_device": "tflops_per_device",
    "mfu": "mfu",
    "memory_gib": "memory_gib",
    "consumed_samples": "consumed_samples",
    "global_batch_size": "global_batch_size",
}
SETTINGS = ("backend", "device", "world_size", "dtype", "global_batch_size", "seq_length", "train_iters")


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / FILE).is_file() and (folder / "metadata.json").is_file()


def read_run_events(file: Path) -> tuple[list[LogStep], list[LogEvaluation], dict[str, str]]:
    """Steps in the order of their events, evaluations, and settings of the run."""
    steps: list[LogStep] = []
    evaluations: list[LogEvaluation] = []
    settings: dict[str, str] = {}
    for event in read_events(file):
        if event["kind"] == "step":
            steps.append(_read_step(event))
        elif event["kind"] == "eval":
            evaluations.append(LogEvaluation({"step": float(event["step"]), "loss": float(event["loss"])}))
        elif event["kind"] == "run_started":
            settings |= {name: str(event[name]) for name in SETTINGS if name in event}
    return steps, evaluations, settings


def _read_step(event: Event) -> LogStep:
    values = {field: float(event[name]) for name, field in FIELDS.items() if isinstance(event.get(name), (int, float))}
    if event.get("loss") is None:
        values["loss"] = float("nan")
    return LogStep({"step": float(event["step"]), **values, "num_skipped": float(bool(event.get("skipped")))})
