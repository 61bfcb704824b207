"""Metrics by OTLP, as a receiver of its protocol gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fakes.cli import find_free_port, wait_for
from observers.conftest import ObservedFolder

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")


class Receiver:
    """A collector that keeps the newest export."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.headers: dict[str, str] = {}
        self.resource: dict[str, str] = {}
        self.values: dict[str, float] = {}
        self.units: dict[str, str] = {}

    def accept(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/metrics"
        import gzip

        content = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        request: Any = service.ExportMetricsServiceRequest.FromString(content)
        self.headers = headers
        for each in request.resource_metrics:
            self.resource = {pair.key: pair.value.string_value for pair in each.resource.attributes}
            for metric in (metric for scope in each.scope_metrics for metric in scope.metrics):
                (point,) = (metric.sum if metric.HasField("sum") else metric.gauge).data_points
                self.values[metric.name] = point.as_double if point.HasField("as_double") else point.as_int
                self.units[metric.name] = metric.unit


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.accept(self.path, dict(self.headers), body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Receiver(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield received
        server.shutdown()


def test_a_collector_gets_the_numbers_of_the_newest_step_and_the_last_ones_at_the_end(
    observed: ObservedFolder, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer canary-of-the-collector")
    observed.observe([{"opentelemetry": {"endpoint": receiver.url, "interval_s": 0.2}}])
    observed.start()
    observed.step(1)
    wait_for(lambda: receiver.values.get("primus.step") == 1, "an export")
    assert receiver.headers["authorization"] == "Bearer canary-of-the-collector"
    names = {"service.name": "primus", "primus.experiment": "night", "primus.run": "20260101_120000-ab12"}
    assert receiver.resource.items() >= names.items()
    observed.step(2)
    observed.append("restart", attempt=1)
    observed.close()
    expected = {"primus.step": 2, "primus.loss": 7.75, "primus.restarts": 1, "primus.tokens": 16384}
    assert receiver.values.items() >= expected.items()
    assert receiver.units["primus.step_time_seconds"] == "s"
    assert observed.said == []


def test_a_collector_that_is_away_is_reported_in_one_line_and_the_run_ends(observed: ObservedFolder) -> None:
    observed.observe([{"opentelemetry": {"endpoint": f"http://127.0.0.1:{find_free_port()}", "interval_s": 0.1}}])
    observed.start()
    observed.step(1)
    wait_for(lambda: observed.said, "the problem")
    observed.close()
    assert all(text.startswith("observer opentelemetry: ") and "\n" not in text for text in observed.said)
    assert len(observed.said) <= 3, observed.said
