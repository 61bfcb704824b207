"""The events of a run: one JSON object a line, appended and flushed, in order."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from primus.redaction import redact_tree

Event = dict[str, Any]
LOAD_EVENT = "machine_load"
"""Event of an attempt that has ended, with the share of the CPUs of node 0 that other processes used."""
NUMBERS = ("loss", "_s", "_gib", "_per_device", "tokens", "samples", "mfu", "grad_norm", "learning_rate")
"""Ends of the names of a step's numbers."""


class EventLog:
    """Appends to the events.jsonl of a run; a line is written in one call, so that writers never interleave."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Before the first append: otherwise the new event would continue the broken line, and be lost with it.
        _end_half_line(path)
        # Unbuffered and in append mode: each event is one write(2) at the end of the file, so that events of several
        # processes do not mix, and a process that is killed loses none.
        self._file = path.open("ab", buffering=0)
        self._encode = msgspec.json.Encoder().encode
        self._unwritten = b""
        """Events that a full disk has not taken."""

    def append(self, kind: str, **fields: Any) -> None:
        """Append an event of `kind`; `fields` must be JSON values.

        What cannot be written is kept for the next call: a full disk does not end a training that may free it.
        """
        line = self._encode({"time": round(time.time(), 6), "kind": kind, **redact_tree(fields)}) + b"\n"
        had_all, data = not self._unwritten, self._unwritten + line
        self._unwritten = self._write(data)
        if self._unwritten and had_all:
            print("events.jsonl cannot be written: events are kept until it can be", file=sys.stderr)

    def _write(self, data: bytes) -> bytes:
        """Write lines; returns what is left to write."""
        try:
            num_bytes = self._file.write(data)
        except OSError:
            num_bytes = 0
        # A disk that fills up takes a part of a line, behind which another writer may append: repeat it on a new line.
        begin = data.rfind(b"\n", 0, num_bytes) + 1
        return (b"\n" if num_bytes > begin else b"") + data[begin:]

    def close(self) -> None:
        if self._unwritten and self._write(self._unwritten):
            print("events.jsonl lacks the last events of this process", file=sys.stderr)
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """All complete events of `path`; none if the file does not exist.

    An incomplete line, left by a writer that was killed, is skipped.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if event := _decode_event(line):
                yield event


class EventFollower:
    """Reads the events that writers append to `path`; each call reads only new ones.

    Args:
        path: Of the events.
        from_start: Whether the first call gives the events that are there already; else they are no news.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() and not from_start else 0

    def read_new_events(self) -> list[Event]:
        """Complete events since the last call; a line that is still being written counts once it is complete."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            # Stops at the last newline. The rest of an event that is being written is read by the next call.
            complete = file.read().rpartition(b"\n")[0]
        if not complete:
            return []
        self._offset += len(complete) + 1
        return [event for line in complete.split(b"\n") if (event := _decode_event(line))]


def _decode_event(line: bytes) -> Event | None:
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    is_event = (
        isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("time"), (int, float))
    )
    return cast(Event, event) if is_event else None


def read_steps(path: Path) -> list[Event]:
    """The `step` events in order of their step.

    Of a step that was repeated after a restart or a rewind, only the last event; none of a step that a rewind undid.
    What should be a number and is not, as after an edit by hand, is None.
    """
    last: dict[int, Event] = {}
    for event in read_events(path):
        if event["kind"] == "step" and isinstance(event.get("step"), int):
            last[event["step"]] = event
        elif event["kind"] == "rewind" and isinstance(event.get("to_step"), int):
            last = {step: taken for step, taken in last.items() if step <= event["to_step"]}
    return [_require_numbers(last[step]) for step in sorted(last)]


def _require_numbers(event: Event) -> Event:
    wrong = [name for name, value in event.items() if isinstance(value, str | list | dict) and name.endswith(NUMBERS)]
    return {**event, **dict.fromkeys(wrong)} if wrong else event


def _end_half_line(path: Path) -> None:
    """End an incomplete line of a killed writer, so that the next event starts on a new line."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
