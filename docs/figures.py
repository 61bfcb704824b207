"""Charts of benchmarks/results for docs/figures.md; each says which record it shows, and of which day."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from primus.report.bar_chart import ChartBar, draw_bar_chart
from primus.report.page import Html

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
OURS, THEIRS = 0, 7
"""Colors of the bars of primus, and of all others."""
Record = Mapping[str, Any]


class Figure(NamedTuple):
    """One chart: which record it shows, and how."""

    title: str
    unit: str
    """What the bars are, and which are better."""
    record: str
    """Name of the file in benchmarks/results."""
    section: str
    """Heading of benchmarks/README.md that says what was measured, as an anchor."""
    list_bars: Callable[[Record], list[ChartBar]]

    def draw(self) -> Html:
        """The chart, for wide and for narrow screens."""
        return draw_bar_chart(self.unit, self.list_bars(self._read()))

    def describe(self) -> str:
        """The day, the machine, and where to read more."""
        record = self._read()
        machine = record["machine"]
        day = machine.get("date") or record["created"][:10]
        cores = machine.get("cores") or machine["cpus"]
        load = f", load {machine['load']:.1f}" if "load" in machine else ""
        processor = f", {machine['processor']}" if "processor" in machine else ""
        return (
            f"{day}, {cores} CPU cores{processor}{load}. "
            f"[What was measured](../benchmarks/README.md#{self.section}); record: `{self.record}`."
        )

    def _read(self) -> Record:
        record: Record = json.loads((RESULTS / self.record).read_text(encoding="utf-8"))
        return record


def _bar(label: str, value: float, unit: str, *, is_ours: bool) -> ChartBar:
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return ChartBar(label, value, f"{text} {unit}", color=OURS if is_ours else THEIRS)


def _list_training_speeds(vocabulary: int, dtype: str) -> Callable[[Record], list[ChartBar]]:
    def list_bars(record: Record) -> list[ChartBar]:
        cell = next(each for each in record["cells"] if (each["vocab"], each["dtype"]) == (vocabulary, dtype))
        return [
            _bar(name, engine["tokens_per_second"], "tokens/s", is_ours=name.startswith("native"))
            for name, engine in cell["engines"].items()
        ]

    return list_bars


def _list_encoding_speeds(record: Record) -> list[ChartBar]:
    speeds = record["llama3"]["megabytes_per_cpu_s"]
    return [_bar(name, speed, "MB per CPU second", is_ours=name.startswith(("primus", "--no"))) for name, speed in
            speeds.items()]  # fmt: skip


def _list_cleaning_speeds(record: Record) -> list[ChartBar]:
    ours, theirs = (record["mb_per_cpu_s"][side] for side in ("ours", "datatrove"))
    pairs = [(name, side, speeds[name]) for name in theirs if name in ours and name not in ("mc4", "fineweb_quality")
             for side, speeds in (("primus", ours), ("datatrove", theirs))]  # fmt: skip
    return [
        _bar(f"{name}, {side}", speed, "MB per CPU second", is_ours=side == "primus") for name, side, speed in pairs
    ]


def _list_start_times(record: Record) -> list[ChartBar]:
    return [
        _bar(f"{program}, {processes}", times[program], "s", is_ours=program == "primus-cli")
        for processes, times in record["seconds_to_first_step"].items()
        for program in ("primus-cli", "torchrun")
    ]


def _list_engine_overheads(record: Record) -> list[ChartBar]:
    return [
        _bar(name, each["speed_ratio"], "x its own speed", is_ours=True) for name, each in record["engines"].items()
    ]


def _list_decision_times(record: Record) -> list[ChartBar]:
    times = record["seconds_from_death_to_decision"]
    bars = []
    for name, each in times.items():
        nodes, ranks = name.split(" nodes of ")
        label = f"{nodes} node{'s' * (nodes != '1')}, {ranks} rank{'s' * (ranks != '1')} each"
        bars.append(_bar(label, each["median"], "s", is_ours=True))
    return bars


def _list_extraction_speeds(record: Record) -> list[ChartBar]:
    return [_bar(each["log"], median(each["mb_per_s"]), "MB/s", is_ours=True) for each in record["logs"]]


FIGURES = {
    "train-speed-bf16": Figure(
        "Training, 23 M parameters, vocabulary 32,000, bf16",
        "tokens per second: longer is better",
        "train_speed-cpu-2-cores.json",
        "training-speed-train_speedpy",
        _list_training_speeds(32000, "bf16"),
    ),
    "train-speed-fp32": Figure(
        "Training, 23 M parameters, vocabulary 32,000, fp32",
        "tokens per second: longer is better",
        "train_speed-cpu-2-cores.json",
        "training-speed-train_speedpy",
        _list_training_speeds(32000, "fp32"),
    ),
    "engine-overhead": Figure(
        "Speed of engines behind primus, against the engine alone",
        "share of the speed of the engine's own loop: longer is better",
        "engine_speed-cpu-2-cores.json",
        "engines-beside-their-own-loops-engine_speedpy",
        _list_engine_overheads,
    ),
    "start": Figure(
        "From the command to the first step",
        "seconds: shorter is better",
        "launch_time-cpu-2-cores.json",
        "launch-launch_timepy",
        _list_start_times,
    ),
    "decision": Figure(
        "From the death of a rank to the decision about a restart",
        "seconds: shorter is better",
        "supervision-cpu-2-cores.json",
        "supervision-supervision_timepy",
        _list_decision_times,
    ),
    "encode": Figure(
        "Tokenizing with the tokenizer of Llama 3",
        "megabytes of text per second of processor time: longer is better",
        "data_encode-cpu-2-cores.json",
        "encoding-data_encodepy",
        _list_encoding_speeds,
    ),
    "clean": Figure(
        "Cleaning text by published rules",
        "megabytes of text per second of processor time: longer is better",
        "data_clean-cpu-2-cores.json",
        "cleaning-and-near-copies-data_cleanpy-data_minhashpy",
        _list_cleaning_speeds,
    ),
    "extract": Figure(
        "Reading logs of other trainers",
        "megabytes per second: longer is better",
        "log_extraction-cpu-2-cores.json",
        "reading-logs-log_extractionpy",
        _list_extraction_speeds,
    ),
}
"""The charts in the order of the page, by the name of their file."""
