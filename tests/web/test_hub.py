from __future__ import annotations

import socket
from pathlib import Path

import pytest

from local_hub import LocalHub, Repo
from primus.errors import PrimusError
from primus.web.hub import (
    download_file,
    explain_hub_errors,
    find_cached_model,
    find_model_folder,
    name_cached_model,
    read_optional_file,
)

constants = pytest.importorskip("huggingface_hub.constants")


def test_models_come_from_the_mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(PrimusError, match=f"hf:me/model: http://{address} cannot be reached") as caught:
        find_model_folder("me/model")
    assert "HF_HOME" in caught.value.hint


def test_an_optional_file_is_absent_without_the_hub() -> None:
    assert read_optional_file("me/model", "chat_template.jinja", ask_hub=True) is None


def test_a_name_that_is_neither_a_path_nor_one_of_the_hub_says_so() -> None:
    with pytest.raises(PrimusError, match="neither a local path, nor a model on"):
        download_file("tokenizers/mine/tokenizer.jsn", "tokenizer.json", "model")


def test_a_snapshot_in_the_cache_has_the_name_of_its_model(tmp_path: Path) -> None:
    assert name_cached_model(tmp_path / "models--org--small" / "snapshots" / "abc") == ("org/small", "abc")
    assert name_cached_model(tmp_path / "small") is None
    assert name_cached_model(tmp_path / "datasets--org--small" / "snapshots" / "abc") is None


def test_a_file_goes_to_the_cache_or_to_the_folder_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with LocalHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repos["me/data"] = Repo({"part/a.txt": b"text"})
        cached = download_file("me/data", "part/a.txt", "dataset")
        placed = download_file("me/data", "part/a.txt", "dataset", folder=tmp_path / "out")
    assert cached.is_relative_to(tmp_path / "cache") and placed == tmp_path / "out/part/a.txt"
    assert cached.read_bytes() == placed.read_bytes() == b"text"
    assert {entry.name for entry in tmp_path.iterdir()} == {"cache", "out"}


def test_a_cached_model_is_found_by_its_branch_or_commit_if_it_is_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--small"
    (repository / "refs").mkdir(parents=True)
    for branch, commit in (("main", "111"), ("old", "222")):
        (repository / "refs" / branch).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        assert find_cached_model(f"org/small@{branch}") is None, "the weights are missing"
        (repository / "snapshots" / commit / "model.safetensors").touch()
    snapshots = repository / "snapshots"
    for name, commit in (("", "111"), ("@main", "111"), ("@old", "222"), ("@222", "222")):
        assert find_model_folder(f"org/small{name}") == snapshots / commit
    assert find_cached_model("org/other") is None
    (snapshots / "111/config.json").unlink()
    assert find_cached_model("org/small") is None


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError("slow"), socket.gaierror("no address")])
def test_an_error_of_the_network_says_that_the_hub_cannot_be_reached(error: OSError) -> None:
    with pytest.raises(PrimusError, match=f"cannot be reached: {error}"), explain_hub_errors("me/data", "dataset"):
        raise error


def test_a_full_disk_is_no_error_of_the_hub() -> None:
    with pytest.raises(OSError, match="No space left"), explain_hub_errors("me/data", "dataset"):
        raise OSError(28, "No space left on device")
