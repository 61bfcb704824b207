"""Stream the events of a Chrome trace: plain or gzip, complete or cut off, at constant memory.

The file is read in blocks. Each block is cut behind its last complete event and decoded at once, which is as fast as
decoding the whole file. Where an event ends is not known without parsing, so a cut is a guess: `}`, a comma and `{`
between two events look like those of a list of objects inside an event. A wrong guess does not decode, and an earlier
one is tried; a block without a right guess is decoded event by event.

Format: "Trace Event Format" (Google), as torch.profiler (Kineto) and jax.profiler write it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from primus.errors import UsageError

BLOCK_BYTES = 256 << 10
"""Decoding larger blocks takes twice as long: the collector of garbage looks at all events of a block several times."""
MOST_GUESSES = 8
_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_GZIP = b"\x1f\x8b"
_SEPARATORS = b" \t\r\n,"
_ROCPROF = b'"rocprofiler-sdk-tool"'
"""First member of the files of `rocprofv3 --output-format json`."""


class EventArguments(Struct, rename=None, gc=False):
    """The arguments of an event that the analysis reads; their types are those that Kineto writes, not checked."""

    external_id: Any = msgspec.field(default=None, name="External id")
    correlation: Any = None
    stream: Any = None
    device: Any = None
    # Most operators have the inputs of an earlier one: their text is compared, and decoded once.
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    concrete_inputs: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")
    num_bytes: Any = msgspec.field(default=None, name="Bytes")
    address: Any = msgspec.field(default=None, name="Addr")
    total_allocated: Any = msgspec.field(default=None, name="Total Allocated")
    device_type: Any = msgspec.field(default=None, name="Device Type")
    device_id: Any = msgspec.field(default=None, name="Device Id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    hlo_op: Any = None
    name: Any = None


class TraceEvent(Struct, gc=False):
    """One event of a trace; times are in microseconds."""

    ph: str = ""
    name: Any = ""
    cat: Any = ""
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    args: EventArguments | None = None


_decode_events = msgspec.json.Decoder(list[TraceEvent]).decode
_decode_event = msgspec.json.Decoder(TraceEvent).decode
_decode_untyped = msgspec.json.Decoder().decode


class TraceFile:
    """One pass over the events of a file. `metadata` and `problem` are complete when the pass is.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        """The other members of the file: baseTimeNanoseconds, deviceProperties, distributedInfo."""
        self.problem = ""
        """Why the rest of the file is missing; empty for a complete file."""
        self.num_skipped = 0
        """Events that are not objects with the usual members."""

    def read_events(self) -> Iterator[list[TraceEvent]]:
        """The events, in blocks.

        Raises:
            UsageError: The file cannot be read, is empty, or is not a trace.
        """
        blocks = self._read_blocks()
        buffer = self._skip_header(blocks)
        is_over = False
        while not is_over:
            block = next(blocks, b"")
            is_over = not block
            buffer += block
            if is_over:
                yield from self._decode_end(buffer)
                return
            events, used, is_closed = self._decode_block(buffer)
            if events:
                yield events
            else:  # an event is longer than the buffer, which is doubled
                buffer += b"".join(itertools.islice(blocks, len(buffer) // BLOCK_BYTES))
            if is_closed:
                rest = buffer[used:]
                for block in blocks:  # members behind the events are small
                    rest += block
                self._read_tail(rest)
                return
            buffer = buffer[used:]

    def _read_blocks(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                head = file.read(2)
                file.seek(0)
                if head != _GZIP:
                    while block := file.read(BLOCK_BYTES):
                        yield block
                    return
                yield from self._decompress(file)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    def _decompress(self, file: Any) -> Iterator[bytes]:
        """The contents of a gzip file, as far as they are there."""
        stream = zlib.decompressobj(31)
        try:
            while compressed := file.read(BLOCK_BYTES >> 3):
                is_exhausted = False
                while not is_exhausted:
                    block = stream.decompress(compressed, BLOCK_BYTES)
                    if block:
                        yield block
                    compressed = stream.unconsumed_tail
                    if stream.eof:  # gzip files may be joined
                        compressed, stream = stream.unused_data, zlib.decompressobj(31)
                    # Output may remain in the stream after all of its input was taken.
                    is_exhausted = not (block or compressed)
        except zlib.error as error:
            self.problem = f"its compressed data is damaged ({error})"

    def _skip_header(self, blocks: Iterator[bytes]) -> bytes:
        """What follows the bracket that opens the events."""
        buffer = b""
        for block in blocks:
            buffer += block
            found = _START.search(buffer)
            if found:
                self._add_metadata(buffer[: found.end()] + b"]}")
                return buffer[found.end() :]
            text = buffer.lstrip()
            if text.startswith(b"["):
                return text[1:]
            if not text.startswith(b"{"):
                break
        reason = "it has no traceEvents" if buffer.strip() else self.problem or "it is empty"
        hint = "give a file of torch.profiler or jax.profiler, or a run that was trained with --profile"
        if _ROCPROF in buffer[:BLOCK_BYTES]:
            reason = "it is rocprofv3's own JSON"
            hint = "record with --profile; Perfetto opens what rocprofv3 writes with --output-format pftrace"
        raise UsageError(f"{self.path}: not a Chrome trace: {reason}", hint)

    def _decode_block(self, buffer: bytes) -> tuple[list[TraceEvent], int, bool]:
        """The complete events of a buffer, the number of bytes they take, and whether the list of events ends there."""
        end = len(buffer)
        for _ in range(MOST_GUESSES):
            brace = _find_last_boundary(buffer, end)
            if brace < 0:
                break
            with contextlib.suppress(msgspec.DecodeError):
                events = self._decode_list(buffer[: brace + 1])
                return events, buffer.index(b"{", brace + 1), False
            end = brace
        return self._decode_singly(buffer)

    def _decode_end(self, buffer: bytes) -> Iterator[list[TraceEvent]]:
        """The last events of a file, complete or not."""
        for found in reversed([*re.finditer(rb"[}\[]\s*\]", buffer)][-MOST_GUESSES:]):
            bracket = found.end() - 1
            with contextlib.suppress(msgspec.DecodeError):
                events = self._decode_list(buffer[:bracket])
                self._read_tail(buffer[bracket:])
                yield events
                return
        events, used, is_closed = self._decode_singly(buffer)
        yield events
        if is_closed:
            self._read_tail(buffer[used:])
        else:
            # The list of events of the array format may lack its closing bracket.
            self.problem = self.problem or "it is cut off"

    def _decode_list(self, text: bytes) -> list[TraceEvent]:
        text = b"[" + text.strip(_SEPARATORS) + b"]"
        try:
            return _decode_events(text)
        except msgspec.ValidationError:
            return self._convert_events(_decode_untyped(text))

    def _convert_events(self, items: list[Any]) -> list[TraceEvent]:
        """Events of which some have unusual members, which are skipped."""
        events = []
        for item in items:
            try:
                events.append(_decode_event(msgspec.json.encode(item)))
            except msgspec.ValidationError:
                self.num_skipped += 1
        return events

    def _decode_singly(self, buffer: bytes) -> tuple[list[TraceEvent], int, bool]:
        """As `_decode_block`, event by event."""
        text = buffer.decode("latin-1")  # one character is one byte, so that offsets agree
        decoder = json.JSONDecoder(strict=False)
        items, place, is_closed = [], 0, False
        while True:
            while place < len(text) and text[place] in " \t\r\n,":
                place += 1
            if place < len(text) and text[place] == "]":
                is_closed = True
                break
            try:
                item, place = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                break
            items.append(item)
        return self._convert_events(items), place, is_closed

    def _read_tail(self, rest: bytes) -> None:
        """The members behind the events; `rest` begins with the bracket that closes these."""
        text = rest.strip().removeprefix(b"]").strip(_SEPARATORS)
        self._add_metadata(b"{" + text if text.startswith(b'"') else b"{}")

    def _add_metadata(self, text: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            found = _decode_untyped(text)
            found.pop("traceEvents", None)
            self.metadata |= found


def _find_last_boundary(buffer: bytes, end: int) -> int:
    """Place of the last `}` before `end` that a comma and `{` follow; -1 if there is none."""
    while (brace := buffer.rfind(b"}", 0, end)) >= 0:
        if _BETWEEN.match(buffer, brace):
            return brace
        end = brace
    return -1
