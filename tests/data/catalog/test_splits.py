from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import cli
from local_hub import LocalHub, Repo
from primus.data import readers
from primus.data.catalog.dataset_folders import find_dataset_folder
from primus.data.catalog.fetch import FetchJob, fetch_dataset
from primus.data.catalog.splits import parse_split
from primus.errors import UsageError


@pytest.mark.parametrize(
    ("text", "num_rows", "rows"),
    [  # what ReadInstruction.from_spec(...).to_absolute({"train": num_rows}) of `datasets` gives
        ("train", 10, [(0, 10)]),
        ("train[:1%]", 1000, [(0, 10)]),
        ("train[:1%]", 149, [(0, 1)]),
        ("train[:1%]", 151, [(0, 2)]),
        ("train[:50%]", 3, [(0, 2)]),
        ("train[10%:20%]", 999, [(100, 200)]),
        ("train[-5%:]", 200, [(190, 200)]),
        ("train[:1000000]", 500, [(0, 500)]),
        ("train[:1_000]", 5000, [(0, 1000)]),
        ("train[-100:]", 500, [(400, 500)]),
        ("train[-1000:]", 500, [(0, 500)]),
        ("train[:-10]", 100, [(0, 90)]),
        ("train[30:20]", 100, [(30, 30)]),
        ("train[:]", 7, [(0, 7)]),
        ("train[:10%](pct1_dropremainder)", 999, [(0, 90)]),
        ("train[:10%](closest)", 999, [(0, 100)]),
        ("train[:5] + train[-5:]", 100, [(0, 5), (95, 100)]),
    ],
)
def test_rows_are_those_of_the_package_datasets(text: str, num_rows: int, rows: list[tuple[int, int]]) -> None:
    assert [(found.start, found.stop) for found in (part.select_rows(num_rows) for part in parse_split(text))] == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train[1%]", "not a split"),
        ("train[", "not a split"),
        ("", "not a split"),
        ("train+", "not a split"),
        ("train[a:b]", "not a split"),
        ("train[:101%]", "more than 100 %"),
        ("train[5:10%]", "percent and rows in one slice"),
        ("train[:10%](floor)", "not a split"),
        ("train[:10](closest)", "without percent"),
        ("train+train", "selected twice"),
        ("all", "'all' is not supported"),
    ],
)
def test_what_is_no_split_is_refused_with_how_to_write_one(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_split(text)
    assert caught.value.hint


def test_one_percent_of_too_few_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="pct1_dropremainder with 99 rows"):
        parse_split("train[:1%](pct1_dropremainder)")[0].select_rows(99)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with LocalHub() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        started.repos["me/data"] = Repo(
            {
                "train-0.jsonl": lines(range(60)),
                "train-1.parquet": parquet(range(60, 100)),
                "train-2.jsonl": lines(range(100, 200)),
                "test-0.jsonl": lines(range(1000, 1010)),
            }
        )
        yield started


def lines(numbers: range) -> bytes:
    return "".join(f'{{"text": "{number}"}}\n' for number in numbers).encode()


def parquet(numbers: range) -> bytes:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.table({"text": [str(number) for number in numbers]}), out)
    return out.getvalue()


def numbers_of(folder: Path, job: FetchJob) -> list[int]:
    files = fetch_dataset(job).files
    assert all(Path(file).parent == folder for file in files)
    return [
        int(item.text)
        for file in files
        for item in readers.read_documents(file)
        if isinstance(item, readers.TextDocument)
    ]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[:1%]", [0, 1]),
        ("train[:1000000]", list(range(200))),
        ("train[:3]", [0, 1, 2]),
        ("train[25%:55%]", list(range(50, 110))),
        ("train[-3:]", [197, 198, 199]),
        ("test+train[:2]", [*range(1000, 1010), 0, 1]),
        ("train[:1]+train[-1:]", [0, 199]),
    ],
)
def test_rows_of_splits_are_fetched(
    hub: LocalHub, tmp_path: Path, split: str, expected: list[int], streaming: bool
) -> None:
    job = FetchJob(dataset="me/data", output=tmp_path / "out", split=split, streaming=streaming)
    assert numbers_of(tmp_path / "out", job) == expected
    requests = len(hub.log)
    assert not fetch_dataset(job).made
    assert len(hub.log) == requests
    with pytest.raises(UsageError, match="contains me/data with split"):
        fetch_dataset(FetchJob(dataset="me/data", output=tmp_path / "out", split="train", streaming=streaming))


@pytest.mark.parametrize("task", ["fetch", "prepare"])
def test_the_commands_take_a_slice_of_the_hub(hub: LocalHub, tmp_path: Path, task: str) -> None:
    """By the hub's own client in a process of its own, as a user has it: rows 58 to 61 are in two files."""
    words = ["--split", "train[58:62]", "--data-path", "d"]
    words += ["me/data"] if task == "fetch" else ["--dataset", "me/data", "--tokenizer", "bpe:257"]
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    done = cli.run("--json", "direct", "--", "data", task, *words, cwd=tmp_path, timeout_s=60, **variables)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / find_dataset_folder(Path("d"), "me/data", "train[58:62]")
    files = readers.find_files(str(folder))
    items = (item for file in files for item in readers.read_documents(file))
    found = [item.text for item in items if isinstance(item, readers.TextDocument)]
    assert found == ["58", "59", "60", "61"]
    if task == "prepare":
        (made,) = json.loads(done.stdout)
        assert (made["documents"], made["tokens"]) == (4, 4 * 3)
    assert not hub.sent("train-2"), "no row of it is wanted"


def test_a_slice_that_ends_with_a_file_reads_no_other_one(hub: LocalHub, tmp_path: Path) -> None:
    job = FetchJob(dataset="me/data", output=tmp_path / "out", split="train[50:60]")
    assert numbers_of(tmp_path / "out", job) == list(range(50, 60))
    assert hub.sent("train-0") and not hub.sent("train-1") and not hub.sent("train-2")


def test_whole_splits_are_fetched_as_they_are(hub: LocalHub, tmp_path: Path) -> None:
    fetched = fetch_dataset(FetchJob(dataset="me/data", output=tmp_path / "out", split="train+test"))
    names = ["train-0.jsonl", "train-1.parquet", "train-2.jsonl", "test-0.jsonl"]
    assert [Path(file).name for file in fetched.files] == names


def test_a_slice_that_was_lost_is_fetched_again_and_no_other(hub: LocalHub, tmp_path: Path) -> None:
    job = FetchJob(dataset="me/data", output=tmp_path / "out", split="train[50:110]")
    expected = numbers_of(tmp_path / "out", job)
    lost = tmp_path / "out" / "part-00001.jsonl.zst"
    kept = (tmp_path / "out" / "part-00000.jsonl.zst").stat().st_mtime_ns
    lost.unlink()
    assert numbers_of(tmp_path / "out", job) == expected == list(range(50, 110))
    assert (tmp_path / "out" / "part-00000.jsonl.zst").stat().st_mtime_ns == kept


@pytest.mark.parametrize(
    ("split", "changes", "message"),
    [
        ("train[:5]", {"num_samples": 3}, "--num-samples with"),
        ("trian[:5]", {}, "no split 'trian'"),
        ("test[:1%]", {}, "selects none of 10 rows"),
    ],
)
def test_a_split_that_cannot_be_fetched_is_an_error(
    hub: LocalHub, tmp_path: Path, split: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        fetch_dataset(FetchJob(dataset="me/data", output=tmp_path / "out", split=split, **changes))


def test_each_split_has_a_folder_that_no_shell_takes_for_a_pattern() -> None:
    names = {
        find_dataset_folder(Path("d"), "c4", split).name for split in ("train", "train[:1%]", "train[-1:]", "train[1:]")
    }
    assert len(names) == 4
    assert "raw-train" in names
    assert not any(set(name) & set("[]*?%:+ ") for name in names)
