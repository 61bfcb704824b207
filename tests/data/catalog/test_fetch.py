from __future__ import annotations

import gzip
import io
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_hub import LocalHub, Repo
from primus.config.schema import DataConfig
from primus.data.catalog import hub as hub_module
from primus.data.catalog.dataset_folders import find_dataset_folder
from primus.data.catalog.fetch import FetchedDataset, FetchJob, fetch_dataset
from primus.data.prepare import named_dataset
from primus.data.readers import ReadOptions, TextDocument, find_files, read_documents
from primus.errors import PrimusError, UsageError
from primus.web import retries

pa = pytest.importorskip("pyarrow")
constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("zstandard")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


def parquet(values: list[str]) -> bytes:
    from pyarrow import parquet as library

    sink = io.BytesIO()
    library.write_table(pa.table({"id": list(range(len(values))), "text": values}), sink)
    return sink.getvalue()


def lines(values: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({key: value, "n": 1}).encode() + b"\n" for value in values)


def texts(fetched: FetchedDataset) -> list[str]:
    return [item.text for file in fetched.files for item in read_documents(file) if isinstance(item, TextDocument)]


def test_a_named_source_is_fetched_once_and_read_from_its_folder(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["allenai/c4"] = Repo(
        {
            "README.md": b"#",
            "en/c4-train.00000-of-00002.json.gz": gzip.compress(lines(["a", "b"])),
            "en/c4-train.00001-of-00002.json.gz": gzip.compress(lines(["c"])),
            "en/c4-validation.00000-of-00001.json.gz": gzip.compress(lines(["v"])),
            "en.noclean/c4-train.00000-of-00001.json.gz": gzip.compress(lines(["noise"])),
        }
    )
    job = FetchJob(dataset="c4", output=tmp_path / "c4")
    fetched = fetch_dataset(job)
    assert (fetched.made, texts(fetched)) == (True, ["a", "b", "c"])
    assert find_files(str(tmp_path / "c4")) == fetched.files
    hub.log.clear()
    again = fetch_dataset(job)
    assert (again.made, again.files, hub.log) == (False, fetched.files, [])
    assert texts(fetch_dataset(FetchJob(dataset="C4:en.noclean", output=tmp_path / "n"))) == ["noise"]
    assert texts(fetch_dataset(FetchJob(dataset="c4", split="validation", output=tmp_path / "v"))) == ["v"]
    with pytest.raises(UsageError, match="contains c4 with split train"):
        fetch_dataset(FetchJob(dataset="c4", split="validation", output=tmp_path / "c4"))


def test_a_split_that_a_source_does_not_have_is_an_error(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["HuggingFaceFW/fineweb"] = Repo({"sample/10BT/000.parquet": parquet(["a"])})
    assert texts(fetch_dataset(FetchJob(dataset="fineweb", output=tmp_path / "out"))) == ["a"]
    with pytest.raises(UsageError, match="no split 'test'"):
        fetch_dataset(FetchJob(dataset="fineweb", split="test", output=tmp_path / "test"))
    with pytest.raises(UsageError, match="no files for the split 'train' of 'CC-MAIN-1999-01'"):
        fetch_dataset(FetchJob(dataset="fineweb:CC-MAIN-1999-01", output=tmp_path / "none"))


def test_a_source_without_texts_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "hollow.py").write_text('"""Nothing."""\n')
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path))
    with pytest.raises(PrimusError, match=r"hollow.py: source 'hollow' has neither documents nor DATASET"):
        fetch_dataset(FetchJob(dataset="hollow", output=tmp_path / "out"))


def test_a_file_that_is_lost_or_cut_is_fetched_again_and_no_other(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["me/data"] = Repo({f"train-{n}.jsonl": lines([f"{n}" * 100]) for n in range(3)})
    job = FetchJob(dataset="me/data", output=tmp_path / "out")
    fetched = fetch_dataset(job)
    Path(fetched.files[1]).write_bytes(b"{")
    Path(fetched.files[2]).unlink()
    hub.log.clear()
    assert texts(fetch_dataset(job)) == ["0" * 100, "1" * 100, "2" * 100]
    assert [bool(hub.sent(f"train-{n}")) for n in range(3)] == [False, True, True]
    assert not fetch_dataset(job).made
    (tmp_path / "out" / ".fetch" / "done.jsonl").write_bytes(b'{"file": "train-')  # its writer was killed
    assert fetch_dataset(job).made
    assert not fetch_dataset(job).made


def test_an_interrupted_download_goes_on_where_it_was(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the tries of the hub's library
    content = parquet([f"{number * 7919}" for number in range(50_000)])
    hub.repos["me/data"] = Repo({"train.parquet": content})
    half = len(content) // 2
    hub.breaks = [half, *[0] * 10]
    job = FetchJob(dataset="me/data", output=tmp_path / "out")
    with pytest.raises(PrimusError, match="cannot be reached"):
        fetch_dataset(job)
    assert find_nothing(tmp_path / "out")
    left = tmp_path / "out" / ".cache" / "huggingface" / "download" / "x.y.incomplete"
    left.write_bytes(content[:half])  # by one that was killed
    hub.breaks = [half]
    hub.log.clear()
    assert texts(fetch_dataset(job)) == [f"{number * 7919}" for number in range(50_000)]
    start, resumed = hub.sent("resolve")
    assert "bytes" not in start
    assert half - (1 << 14) <= int(resumed.rpartition("bytes=")[2].rstrip("-")) <= half
    assert not left.exists()


def find_nothing(folder: Path) -> bool:
    """Whether no reader takes anything in a folder for text."""
    try:
        return not find_files(str(folder))
    except UsageError:
        return True


def test_what_a_killed_command_left_is_removed(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["me/data"] = Repo({"train.jsonl": lines(["one", "two"])})
    job = FetchJob(dataset="me/data", output=tmp_path / "out", num_samples=1)
    [file] = fetch_dataset(job).files
    Path(file).rename(f"{file}.tmp.77")
    assert fetch_dataset(job).made
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".fetch", "part-00000.jsonl.zst"]


def test_a_folder_of_other_files_is_left_alone(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["me/data"] = Repo({"train.jsonl": lines(["one"])})
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="contains other files"):
        fetch_dataset(FetchJob(dataset="me/data", output=tmp_path))
    assert (tmp_path / "train.jsonl").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


def test_a_file_that_arrives_damaged_is_not_kept(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["me/data"] = Repo({"train-0.jsonl": lines(["good"]), "train-1.jsonl": lines(["bad"])})
    hub.damaged = {"train-1.jsonl"}
    job = FetchJob(dataset="me/data", output=tmp_path / "out", workers=1)
    with pytest.raises(PrimusError, match=r"train-1.jsonl: corrupt download"):
        fetch_dataset(job)
    assert not (tmp_path / "out" / "train-1.jsonl").exists()
    hub.damaged.clear()
    hub.log.clear()
    assert texts(fetch_dataset(job)) == ["good", "bad"]
    assert not hub.sent("train-0")


@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_documents_are_taken_whatever_the_format(hub: LocalHub, tmp_path: Path, streaming: bool) -> None:
    values = [f"text {number}" for number in range(30)]
    hub.repos["me/data"] = Repo({f"data/train-{n}.parquet": parquet(values[n * 10 : n * 10 + 10]) for n in range(3)})
    job = FetchJob(dataset="me/data", output=tmp_path / "out", num_samples=15, streaming=streaming)
    fetched = fetch_dataset(job)
    assert texts(fetched) == values[:15]
    assert [document.fields for document in read_documents(fetched.files[1], options=ReadOptions(fields=True))][:1] == [
        {"id": 0}
    ]
    assert [each.documents for each in fetched.done] == [10, 5]
    assert not hub.sent("train-2")
    hub.log.clear()
    assert (fetch_dataset(job).made, hub.log) == (False, [])
    assert bool(list((tmp_path / "cache").rglob("*.parquet"))) != streaming
    Path(fetched.files[1]).unlink()
    assert texts(fetch_dataset(job)) == values[:15]
    assert not hub.sent("train-0")


def test_a_dataset_that_is_a_program_is_read_from_the_parquet_branch(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["bookcorpus/bookcorpus"] = Repo(
        {"bookcorpus.py": b"import datasets", "README.md": b"#"},
        {
            "plain_text/partial-train/0000.parquet": parquet(["a"]),
            "plain_text/partial-train/0001.parquet": parquet(["b"]),
        },
    )
    said: list[str] = []
    fetched = fetch_dataset(FetchJob(dataset="bookcorpus", output=tmp_path / "out"), said.append)
    assert texts(fetched) == ["a", "b"]
    assert "of the first 5 GB instead of bookcorpus/bookcorpus, which is a program that is not run" in said[0]
    hub.repos["me/old"] = Repo({"old.py": b"import datasets"})
    hub.repos["me/two"] = Repo({"a.txt": b"a"}, {"one/train/0.parquet": parquet(["1"])})
    assert texts(fetch_dataset(FetchJob(dataset="me/two:one", output=tmp_path / "two"))) == ["1"]
    with pytest.raises(UsageError, match="it is a program, which 'datasets' 4 and later do not run either"):
        fetch_dataset(FetchJob(dataset="me/old", output=tmp_path / "old"))


def test_the_readme_says_which_files_are_a_configuration(hub: LocalHub, tmp_path: Path) -> None:
    card = {
        "configs": [
            {"config_name": "de", "data_files": [{"split": "train", "path": "de/*.jsonl"}]},
            {
                "config_name": "en",
                "data_files": [{"split": "train", "path": ["en/**"]}, {"split": "x", "path": "x.jsonl"}],
            },
        ]
    }
    files = {
        "de/1.jsonl": lines(["eins"]),
        "en/a/1.jsonl": lines(["one"]),
        "x.jsonl": lines(["x"]),
        "de/old/1.jsonl": lines(["alt"]),
    }
    hub.repos["me/data"] = Repo(files, card=card)
    assert texts(fetch_dataset(FetchJob(dataset="me/data:en", output=tmp_path / "en"))) == ["one"]
    assert texts(fetch_dataset(FetchJob(dataset="me/data:de", output=tmp_path / "de"))) == ["eins"]
    with pytest.raises(UsageError, match="several configurations") as caught:
        fetch_dataset(FetchJob(dataset="me/data", output=tmp_path / "none"))
    assert "me/data:CONFIG; available: de, en" in caught.value.hint
    with pytest.raises(UsageError, match="no configuration 'fr'"):
        fetch_dataset(FetchJob(dataset="me/data:fr", output=tmp_path / "fr"))
    with pytest.raises(UsageError, match="no split 'test'") as caught:
        fetch_dataset(FetchJob(dataset="me/data:en", split="test", output=tmp_path / "test"))
    assert caught.value.hint == "valid: train, x"


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (("a.jsonl", "b.jsonl"), "train", ["a.jsonl", "b.jsonl"]),
        (("data/train-0.jsonl", "data/test-0.jsonl"), "test", ["data/test-0.jsonl"]),
        (("dev/1.jsonl", "train/1.jsonl"), "validation", ["dev/1.jsonl"]),
        (("training.jsonl", "valuable.jsonl"), "train", ["training.jsonl"]),
    ],
)
def test_else_the_names_of_the_files_tell_the_split(
    hub: LocalHub, files: tuple[str, ...], split: str, expected: list[str]
) -> None:
    hub.repos["me/data"] = Repo({file: lines(["a"]) for file in files})
    assert [file.path for file in hub_module.list_split_files("me/data", split).files] == expected


def test_what_the_hub_refuses_is_told_with_what_to_do(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.01)
    with pytest.raises(UsageError, match=r"me/none: no such dataset on http://127"):
        fetch_dataset(FetchJob(dataset="me/none", output=tmp_path / "out"))
    with pytest.raises(UsageError, match="no source 'finewep'") as caught:
        fetch_dataset(FetchJob(dataset="finewep", output=tmp_path / "out"))
    assert caught.value.hint == "did you mean 'fineweb'?"
    hub.status["me/gated"] = (403, "GatedRepo")
    with pytest.raises(PrimusError, match="only after accepting its terms") as refused:
        fetch_dataset(FetchJob(dataset="me/gated", output=tmp_path / "out"))
    assert "HF_TOKEN" in refused.value.hint
    hub.status["me/broken"] = (500, "")
    with pytest.raises(PrimusError, match="responded with 500"):
        fetch_dataset(FetchJob(dataset="me/broken", output=tmp_path / "out"))


def test_a_hub_that_cannot_be_reached_is_one_error_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    job = FetchJob(dataset="fineweb", output=tmp_path / "out")
    with pytest.raises(PrimusError, match="HF_HUB_OFFLINE is set"):
        fetch_dataset(job)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    start = time.monotonic()
    with pytest.raises(PrimusError, match=rf"fineweb: http://127.0.0.1:{port} cannot be reached"):
        fetch_dataset(job)
    assert time.monotonic() - start < 30


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_module, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(PrimusError, match="cannot be reached: timed out"):
            fetch_dataset(FetchJob(dataset="fineweb", output=tmp_path / "out"))


def test_what_is_on_this_machine_is_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="python-stdlib: a local dataset"):
        fetch_dataset(FetchJob(dataset="python-stdlib", output=tmp_path))


def test_the_folder_of_a_dataset_is_one_for_each_name_and_split() -> None:
    folders = {str(find_dataset_folder(Path("d"), *each)) for each in (("c4", "train"), ("c4", "x"), ("c4:en", "x"))}
    assert folders == {"d/c4/raw-train", "d/c4/raw-x", "d/c4-en/raw-x"}


def test_training_can_name_a_dataset_of_the_hub(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["me/Some_data"] = Repo({"train.jsonl": lines(["the quick brown fox"] * 50)})
    data = DataConfig(dataset="me/Some_data", data_path=str(tmp_path), tokenizer_type="ByteLevelBPE")
    prefix = named_dataset.ensure_dataset(data, 280)
    assert prefix == tmp_path / "me--some-data" / "bpe-280" / "me--some-data_text_document"
    assert prefix.with_suffix(".bin").exists()
    hub.log.clear()
    assert named_dataset.ensure_dataset(data, 280) == prefix
    assert not hub.log


def test_training_finds_the_column_of_the_text(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["me/data"] = Repo({"train.jsonl": lines(["the quick brown fox"] * 50, "content")})
    data = DataConfig(dataset="me/data", data_path=str(tmp_path), tokenizer_type="ByteLevelBPE")
    prefix = named_dataset.ensure_dataset(data, 280)
    assert prefix.name == "me--data_content_document"
    assert named_dataset.ensure_dataset(data, 280) == prefix
