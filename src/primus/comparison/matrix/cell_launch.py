"""Launch the command of a cell, or those of several cells that take turns, and wait for their ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from msgspec import Struct

from primus.comparison.folder.comparison_folder import ComparisonFolder
from primus.comparison.matrix.cells import MatrixCell
from primus.comparison.matrix.machine_load import LoadRecorder
from primus.comparison.results.result import ResultLoad
from primus.errors import EXIT_TIMED_OUT
from primus.machine.facts import MachineFacts
from primus.messages import Say
from primus.process import end_program, set_parent_death_signal
from primus.redaction import redact
from primus.runs import step_turns

PATIENCE_S = 30.0
"""Time for the launcher of a cell to stop its workers before all its processes are killed."""


class CellHarness(Struct, frozen=True, kw_only=True):
    """What all cells of a command share."""

    folder: ComparisonFolder
    environ: Mapping[str, str]
    facts: MachineFacts
    timeout_s: float
    say: Say


class CellEnd(Struct, frozen=True, kw_only=True):
    """How the launch of a cell ended."""

    exit_code: int
    last_line: str
    load: ResultLoad
    turn_group: str = ""


def launch_cells(cells: Sequence[MatrixCell], harness: CellHarness) -> list[CellEnd]:
    """Run the commands of cells to their ends, or to the time limit of them together.

    Several cells take turns. What the machine does besides is one record for all: each is a process of the others.
    """
    deadline = time.monotonic() + harness.timeout_s * len(cells)
    recorder = LoadRecorder(harness.facts, harness.environ)
    with recorder, ExitStack() as stack:
        children, runs = [], []
        for cell in cells:
            variables = {}
            if len(cells) > 1:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primus-turns-")))
                giver = step_turns.TurnGiver(folder)
                stack.callback(giver.close)
                variables[step_turns.VARIABLE] = str(folder)
            children.append(stack.enter_context(_start_cell(cell, harness, variables)))
            if variables:
                runs.append((giver, partial(_has_ended, children[-1])))
        step_turns.give_turns(runs, cells[0].turn_steps, deadline)
        codes = [_wait_for_end(child, deadline) for child in children]
    load = recorder.summarize_load() if cells[0].is_local else ResultLoad()
    group = uuid.uuid4().hex if len(cells) > 1 else ""
    logs = [harness.folder.find_log(cell.name) for cell in cells]
    return [
        CellEnd(exit_code=code, last_line=_read_last_line(log), load=load, turn_group=group)
        for log, code in zip(logs, codes, strict=True)
    ]


@contextmanager
def _start_cell(
    cell: MatrixCell, harness: CellHarness, variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    log = harness.folder.find_log(cell.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "primus", *cell.command],
            env={**harness.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the harness, which stops the launcher
            # A launcher here dies with its workers; one that has started others elsewhere must stop these first.
            preexec_fn=partial(set_parent_death_signal, signal.SIGKILL if cell.is_local else signal.SIGTERM),
        )
        try:
            yield child
        finally:
            # Also after a signal: no process of a cell outlives the harness.
            end_program(child, PATIENCE_S)


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    return child.poll() is not None


def _wait_for_end(child: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return EXIT_TIMED_OUT


def _read_last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    said = [line for line in lines if line.startswith("primus-cli: ")]
    return redact((said or lines or [""])[-1])
