from __future__ import annotations

import gzip
import importlib.util
import io
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_hub import LocalHub
from primus.cli.main import main
from primus.data.readers import TextDocument, find_files, lines, plan_shards, read_documents, read_size, remote
from primus.errors import PrimusError, UsageError

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

CONTENT = b"".join(b'{"text": "%d"}\n' % (number * 7919) for number in range(100_000))
TEXTS = [str(number * 7919) for number in range(100_000)]


LATE = 1 << 30


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)
    with LocalHub() as hub:
        yield hub


def texts(url: str, shard_bytes: int = 1 << 30) -> list[str]:
    parts = [part for shard in plan_shards([url], shard_bytes=shard_bytes) for part in shard.parts]
    return [item.text for part in parts for item in read_documents(part) if isinstance(item, TextDocument)]


def test_a_file_behind_a_url_is_read_by_parts(server: LocalHub) -> None:
    server.plain = {"a.jsonl": CONTENT, "b.jsonl.gz": gzip.compress(CONTENT)}
    url = f"{server.url}/plain/a.jsonl"
    assert find_files(url) == [url]
    assert read_size(url) == len(CONTENT)
    assert texts(url, 300_000) == texts(url) == texts(f"{server.url}/plain/b.jsonl.gz?token=1") == TEXTS
    assert texts(f"{server.url}/stream/a.jsonl") == TEXTS


@pytest.mark.parametrize("place", ["plain", "stream"])
def test_reading_goes_on_where_the_connection_broke(
    server: LocalHub, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BLOCK", 1 << 16)
    monkeypatch.setattr(lines, "BLOCK", 1 << 16)
    server.plain["a.jsonl"] = CONTENT
    breaks = {"plain": [LATE, LATE, 50_000, 60_000, LATE, 50], "stream": [LATE, LATE, 900_000, LATE, 10]}
    server.breaks = breaks[place]
    assert texts(f"{server.url}/{place}/a.jsonl") == TEXTS
    assert not server.breaks


def test_row_groups_are_read_by_url(server: LocalHub) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pa.table({"text": TEXTS}), sink, row_group_size=20_000)
    server.plain["a.parquet"] = sink.getvalue()
    assert texts(f"{server.url}/plain/a.parquet", 100_000) == TEXTS
    with pytest.raises(PrimusError, match="its server sends whole files only"):
        texts(f"{server.url}/stream/a.parquet")


def test_what_changes_at_a_url_changes_its_version(server: LocalHub) -> None:
    server.plain["a.jsonl"] = b"{}"
    before = remote.read_remote_facts(f"{server.url}/plain/a.jsonl")
    assert (before.size, before == remote.read_remote_facts(f"{server.url}/plain/a.jsonl")) == (2, True)
    server.plain["a.jsonl"] = b"[]"
    assert remote.read_remote_facts(f"{server.url}/plain/a.jsonl") != before


def test_what_is_not_there_is_told(server: LocalHub) -> None:
    with pytest.raises(UsageError, match=r"none.jsonl: no such file"):
        find_files(f"{server.url}/plain/none.jsonl")
    with pytest.raises(UsageError, match="unsupported kind of text file"):
        find_files(f"{server.url}/plain/x.png")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PrimusError, match=r"cannot be reached.*tries: 3"):
        find_files(f"http://127.0.0.1:{port}/a.jsonl")
    with pytest.raises(UsageError, match="nosuch"):
        find_files("nosuch://x/a.jsonl")


def test_a_server_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "READ_TIMEOUT_S", 0.1)
    monkeypatch.setattr(remote, "ABORT_AFTER_S", 0.0)
    remote._build_web_settings.cache_clear()
    try:
        silent = socket.create_server(("127.0.0.1", 0))
        with silent, pytest.raises(PrimusError, match=r"cannot be reached.*imeout.*tries: 1"):
            find_files(f"http://127.0.0.1:{silent.getsockname()[1]}/a.jsonl")
    finally:
        remote._build_web_settings.cache_clear()


def test_a_protocol_whose_package_is_missing_names_it() -> None:
    if importlib.util.find_spec("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(UsageError, match="needs the package s3fs") as caught:
        find_files("s3://bucket/a.jsonl")
    assert caught.value.hint == "pip install s3fs"


def test_folders_and_patterns_of_a_store_are_searched() -> None:
    store = fsspec.filesystem("memory")
    for name in ("b/2.jsonl", "a/1.jsonl", "a/x.png", "a/settings.json"):
        store.pipe(f"/corpus/{name}", b'{"text": "%s"}\n' % name.encode())
    try:
        assert find_files("memory://corpus") == ["memory:///corpus/a/1.jsonl", "memory:///corpus/b/2.jsonl"]
        assert find_files("memory://corpus/*/1.*") == ["memory:///corpus/a/1.jsonl"]
        assert [text for url in find_files("memory://corpus") for text in texts(url)] == ["a/1.jsonl", "b/2.jsonl"]
        with pytest.raises(UsageError, match="no text in this folder"):
            find_files("memory://nothing")
    finally:
        store.rm("/corpus", recursive=True)


def test_a_token_in_the_address_of_an_input_is_in_no_file_that_is_made_of_it(
    server: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.plain = {"a.jsonl": CONTENT}
    words = ["data", "dedup", "--method", "exact", "--input", f"{server.url}/plain/a.jsonl?token=cnry-of-an-address"]
    command = ["direct", "--", *words, "--output", str(tmp_path / "out"), "--workers", "1"]
    assert main(command) == 0
    assert main(command) == 0
    said = capsys.readouterr()
    assert "nothing to do" in said.out + said.err, "the input is known again without its token"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert not [path for path in files if b"cnry" in path.read_bytes()]
    assert "cnry" not in said.out + said.err
