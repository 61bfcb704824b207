"""The first pod of a TrainJob posts its progress to the address that Kubeflow Trainer names."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from primus.errors import PrimusError
from primus.runs.run_progress import RunProgress
from primus.runtime import PostRefused
from primus.runtimes.kubernetes.progress import post_progress

PROGRESS = RunProgress(step=120, total=1000, loss=2.5, remaining_s=61.4)


class StatusServer:
    """What a server of Kubeflow Trainer is sent, and the status of its answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, Any]] = []
        self.status = 200
        self.url = ""


@pytest.fixture
def server() -> Iterator[StatusServer]:
    found = StatusServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.requests.append((self.command, self.path, self.headers["Authorization"], body))
            self.send_response(found.status)
            self.end_headers()
            self.wfile.write(b'{"kind": "Status", "message": "Forbidden"}')

        def log_message(self, format: str, *args: object) -> None: ...

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{listening.server_address[1]}"
    yield found
    listening.shutdown()
    listening.server_close()
    thread.join()


@pytest.fixture
def environ(server: StatusServer, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("first\n")
    url = f"{server.url}/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/night/status"
    return {"KUBEFLOW_TRAINER_SERVER_URL": url, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token")}


def test_the_status_of_a_trainjob_has_progress_time_and_metrics(
    server: StatusServer, environ: dict[str, str], tmp_path: Path
) -> None:
    post_progress(PROGRESS, "/apis/x/{}/trainjobs/night", environ)
    (tmp_path / "token").write_text("second")
    post_progress(RunProgress(step=1, total=1000), "/apis/x/{}/trainjobs/night", environ)
    (_, path, token, body), (_, _, renewed, short) = server.requests
    assert path.endswith("/namespaces/ml/trainjobs/night/status")
    assert (token, renewed) == ("Bearer first", "Bearer second"), "the token rotates"
    status = body["trainerStatus"]
    assert status.pop("lastUpdatedTime").endswith("Z")
    metrics = [{"name": "step", "value": "120"}, {"name": "loss", "value": "2.5"}]
    assert status == {"progressPercentage": 12, "estimatedRemainingSeconds": 61, "metrics": metrics}
    assert "estimatedRemainingSeconds" not in short["trainerStatus"]


@pytest.mark.parametrize(("status", "is_final"), [(403, True), (404, True), (429, False), (503, False)])
def test_a_refusal_is_final_and_an_unhealthy_server_is_not(
    status: int, is_final: bool, server: StatusServer, environ: dict[str, str]
) -> None:
    server.status = status
    with pytest.raises(PrimusError, match=f"{status} Forbidden") as error:
        post_progress(PROGRESS, "/x", environ)
    assert isinstance(error.value, PostRefused) is is_final


def test_a_server_that_is_not_there_is_asked_again(environ: dict[str, str]) -> None:
    with pytest.raises(PrimusError, match="cannot be reached") as error:
        post_progress(PROGRESS, "/x", environ | {"KUBEFLOW_TRAINER_SERVER_URL": "http://127.0.0.1:9/x"})
    assert not isinstance(error.value, PostRefused)


def test_a_pod_without_an_account_posts_nothing() -> None:
    with pytest.raises(PostRefused, match="no account of the cluster"):
        post_progress(PROGRESS, "/x", {})
