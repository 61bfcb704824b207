from __future__ import annotations

import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from local_hub import LocalHub, Repo
from primus.data import readers
from primus.data.catalog.fetch import FetchJob, fetch_dataset
from primus.errors import PrimusError
from primus.web import retries
from primus.web.retries import read_retry_after, repeat_download

REQUEST_S = 10.0
"""Time that a request to this machine takes at most."""


class Answer(Exception):
    """An error as HTTP libraries raise it, with its response."""

    def __init__(self, status_code: int, **headers: str) -> None:
        super().__init__(f"answer {status_code}")
        self.response = type("Response", (), {"status_code": status_code, "headers": headers})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with LocalHub() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        yield started


def failing(*errors: Exception) -> Any:
    left = list(errors)

    def act() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return act


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "120"}, 120.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 30.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"Retry-After": "Wed, 99 Oct 2015 07:28:00 GMT"}, None),
    ],
)
def test_the_wait_that_a_server_asks_for_is_seconds_or_a_date(headers: dict[str, str], seconds: float | None) -> None:
    assert read_retry_after(Answer(429, **headers)) == seconds


def test_a_date_without_the_server_s_clock_is_compared_with_ours() -> None:
    wait = read_retry_after(Answer(503, **{"Retry-After": formatdate(time.time() + 60, usegmt=True)}))
    assert wait is not None
    assert 58 <= wait <= 61


def test_a_request_is_sent_again_until_it_is_answered() -> None:
    said: list[str] = []
    busy = [Answer(status, **{"Retry-After": "0"}) for status in (429, 503, 502, 504)]
    assert repeat_download("hub", failing(*busy), said.append) == "done"
    assert said[0] == "hub answers 429: trying again in 0 s (2 of 5)"
    assert len(said) == 4
    with pytest.raises(Answer, match="503"):
        repeat_download("hub", failing(*busy, Answer(503)), said.append)


@pytest.mark.parametrize(
    "error", [Answer(404), Answer(401), ValueError("other"), Answer(429, **{"Retry-After": "301"})]
)
def test_what_does_not_help_is_not_sent_again(error: Exception) -> None:
    with pytest.raises(type(error)):
        repeat_download("hub", failing(error), lambda text: pytest.fail(text))


def test_the_pause_grows_where_the_server_does_not_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [retries.compute_pause(Answer(503), attempt) for attempt in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 8.0]
    assert retries.compute_pause(Answer(404), 1) is None


def test_a_cluster_s_server_is_asked_five_times_and_may_ask_for_at_most_30_seconds() -> None:
    assert [retries.choose_cluster_pause(attempt, None) for attempt in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 4.0, None]
    assert [retries.choose_cluster_pause(1, asked) for asked in (0.0, 29.0, 31.0)] == [0.0, 29.0, 30.0]
    assert retries.choose_cluster_pause(5, 1.0) is None


def test_fetching_waits_as_long_as_the_hub_asks(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["me/data"] = Repo({"a.jsonl": b'{"text": "one"}\n'})
    date = formatdate(time.time() + 2, usegmt=True)
    hub.refusals = [(429, {"Retry-After": "1"}), (503, {"Retry-After": date}), (503, {"Retry-After": "0"})]
    said: list[str] = []
    start = time.monotonic()
    fetched = fetch_dataset(FetchJob(dataset="me/data", output=tmp_path / "out"), said.append)
    assert time.monotonic() - start >= 1
    assert [Path(file).name for file in fetched.files] == ["a.jsonl"]
    assert [line.split(":")[-1].split(" in ")[0].strip() for line in said[:2]] == ["trying again"] * 2


@pytest.mark.parametrize("status", [429, 503])
def test_a_download_waits_too(hub: LocalHub, tmp_path: Path, status: int, capsys: Any) -> None:
    hub.repos["me/data"] = Repo({"a.jsonl": b'{"text": "one"}\n'})
    job = FetchJob(dataset="me/data", output=tmp_path / "out")
    fetch_dataset(job)
    (tmp_path / "out" / "a.jsonl").unlink()
    hub.refusals = [(status, {"Retry-After": "0"})] * 4
    assert fetch_dataset(job).made
    assert hub.refusals == []


def test_a_hub_that_asks_for_hours_is_given_up_at_once(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos["me/data"] = Repo({"a.jsonl": b'{"text": "one"}\n'})
    hub.refusals = [(429, {"Retry-After": "7200"})]
    start = time.monotonic()
    with pytest.raises(PrimusError, match="responded with 429") as caught:
        fetch_dataset(FetchJob(dataset="me/data", output=tmp_path / "out"))
    assert "asks to wait 7,200 s" in caught.value.hint
    assert time.monotonic() - start < REQUEST_S


def test_a_url_is_read_after_the_wait_that_its_server_asks_for(hub: LocalHub, capsys: Any) -> None:
    hub.plain["a.jsonl"] = b'{"text": "one"}\n'
    hub.refusals = [(429, {"Retry-After": "0"})] * 4
    url = f"{hub.url}/plain/a.jsonl"
    assert [item.text for item in readers.read_documents(url) if isinstance(item, readers.TextDocument)] == ["one"]
    assert "its server asks to wait" in capsys.readouterr().err
