from __future__ import annotations

import socket
from pathlib import Path

import pytest

from primus.errors import PrimusError
from primus.web.hub import download_file, find_model_folder, name_cached_model, read_optional_file

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
