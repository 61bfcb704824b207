"""Traces are read in blocks: any layout of JSON, compressed or cut off, with the same events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from primus.errors import UsageError
from primus.traces import chrome_events
from primus.traces.chrome_events import TraceFile
from primus.traces.trace import read_trace
from traces.chrome_trace import TraceWriter


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    """A trace of many blocks, in which lists of objects inside events look like the ends of events."""
    monkeypatch.setattr(chrome_events, "BLOCK_BYTES", 700)
    writer = TraceWriter(rank=3)
    for index in range(60):
        decoy = [{"a": 1}, {"b": "}, {"}] if index % 7 == 0 else '"}, {" \u00e9'
        writer.add_kernel(f"gemm_{index}", index * 10, index * 10 + 4, decoy=decoy)
    return writer.format()


def read_names(path: Path) -> tuple[list[str], TraceFile]:
    file = TraceFile(path)
    return [str(event.name) for block in file.read_events() for event in block], file


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_gzip", [False, True])
def test_blocks_lose_no_event_and_keep_the_other_members(
    text: str, tmp_path: Path, indent: int | None, is_gzip: bool
) -> None:
    data = json.dumps(json.loads(text), indent=indent).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(data) if is_gzip else data)
    names, file = read_names(path)
    assert names == [f"gemm_{index}" for index in range(60)]
    assert file.problem == ""
    assert file.metadata["distributedInfo"]["rank"] == 3
    assert file.metadata["traceName"] == "x", "the member behind the events"


def test_a_bare_list_of_events_may_lack_its_bracket(text: str, tmp_path: Path) -> None:
    events = json.dumps(json.loads(text)["traceEvents"])
    for name, content in {"closed": events, "open": events[:-1] + ",\n"}.items():
        (tmp_path / name).write_text(content)
        assert len(read_names(tmp_path / name)[0]) == 60


@pytest.mark.parametrize("is_gzip", [False, True])
def test_of_a_trace_that_is_cut_off_the_whole_events_are_read(text: str, tmp_path: Path, is_gzip: bool) -> None:
    data = gzip.compress(text.encode()) if is_gzip else text.encode()
    path = tmp_path / "trace.json"
    counts = []
    for share in (0.5, 0.7, 0.85):
        path.write_bytes(data[: int(len(data) * share)])
        names, file = read_names(path)
        assert names == [f"gemm_{index}" for index in range(len(names))]
        assert file.problem == "it is cut off"
        counts.append(len(names))
    assert counts[0] <= counts[1] <= counts[2] < 60
    assert counts[2] > 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it is empty"),
        (b'{"a": 1}', "it has no traceEvents"),
        (b"step 1 loss 3\n", "it has no traceEvents"),
        (b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}', "rocprofv3's own JSON"),
        (b"\x1f\x8b\x08garbage", "compressed data is damaged"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        read_names(path)


def test_events_with_unusual_members_are_counted_and_skipped(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add_kernel("gemm", 0, 1)
    writer.events += [{"ph": 7, "name": "x"}, {"ph": "X", "args": "none"}]
    names, file = read_names(writer.write(tmp_path / "trace.json"))
    assert (names, file.num_skipped) == (["gemm"], 2)


def test_an_event_longer_than_many_blocks_and_inputs_of_any_type_are_read(text: str, tmp_path: Path) -> None:
    trace = json.loads(text)
    trace["traceEvents"][20]["args"]["stack"] = "x" * 20_000
    odd = (None, 3, "8,4", {"a": 1}, [], [[8, 4], []])
    for event, dims in zip(trace["traceEvents"], odd, strict=False):
        event |= {"cat": "cpu_op", "args": {"Input Dims": dims, "Input type": dims, "Concrete Inputs": dims}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    assert len(read_names(path)[0]) == 60
    found = read_trace(path)
    assert [str(shape) for shape in found.shapes] == ["[8,4]"]
    assert found.operators.extra["shape"].tolist() == [-1] * 5 + [0]
