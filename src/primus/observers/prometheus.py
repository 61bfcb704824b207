"""Metrics of a run for Prometheus: an HTTP endpoint, or a file for the textfile collector of node_exporter."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from primus.errors import PrimusError, UnfitError
from primus.observer import Observer
from primus.package_files import PROGRAM
from primus.runs.files import write_text

if TYPE_CHECKING:
    from primus.observer import ObservedRun
    from primus.runs.events import Event
    from primus.runs.run_metrics import RunMetrics

NUM_PORTS = 16
"""Ports that are tried, from the one that is asked for: runs of one host then have neighbouring ports, which a
configuration of Prometheus can list."""
DEFAULT_PORT = 9464
"""Of the exporters of OpenTelemetry for Prometheus; 9400, the beginning of many ranges, is that of NVIDIA's DCGM."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `prometheus`."""

    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """Port of the endpoint, or the next one that is free; 9464 unless a textfile is asked for."""
    address: str = "0.0.0.0"  # noqa: S104 - Prometheus scrapes from another host
    """Address that the endpoint listens on; 127.0.0.1 for this host only."""
    textfile: str | None = None
    """Folder of node_exporter's textfile collector: a file of the run is kept there until the run ends."""


class _RunCollector:
    """Gives the metrics of the run in the form of prometheus_client; is asked by a thread of its server."""

    def __init__(self, observed: ObservedRun) -> None:
        self.metrics: RunMetrics | None = None
        self._names = {"experiment": observed.name, "run": observed.run.id}
        self._info = {**self._names, "host": observed.host}

    def collect(self) -> Iterator[Any]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        metrics = self.metrics
        known = {"backend": "", "device": "", "state": "starting"}
        if metrics is not None:
            known = {name: str(metrics.started.get(name, "")) for name in ("backend", "device")}
            known["state"] = metrics.state
        info = {**self._info, **known}
        family: Any = GaugeMetricFamily(
            "primus_run_info", "The run: always 1, with what it is as labels", labels=list(info)
        )
        family.add_metric(list(info.values()), 1.0)
        yield family
        for each in metrics.list_metrics() if metrics is not None else ():
            kind = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
            family = kind(f"primus_{each.name}", each.description, labels=list(self._names))
            family.add_metric(list(self._names.values()), each.value)
            yield family


class PrometheusObserver(Observer):
    """Keeps the newest metrics for who scrapes them."""

    def __init__(self, options: Options, observed: ObservedRun) -> None:
        from prometheus_client import CollectorRegistry

        self._registry = CollectorRegistry()
        self._collector = _RunCollector(observed)
        self._registry.register(self._collector)
        self._server: Any = None
        self._file: Path | None = None
        if options.textfile:
            self._file = Path(options.textfile).expanduser() / f"primus-{observed.name}-{observed.run.id}.prom"
            self._write_file()
        if options.port or not options.textfile:
            self._server = self._start_server(options.port or DEFAULT_PORT, options.address, observed)

    def observe(self, events: Sequence[Event], metrics: RunMetrics) -> None:
        self._collector.metrics = metrics
        self._write_file()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)  # node_exporter would report a run that has ended for ever

    def _start_server(self, first: int, address: str, observed: ObservedRun) -> Any:
        from prometheus_client import start_http_server

        for port in range(first, min(first + NUM_PORTS, 65536)):
            try:
                server, _ = start_http_server(port, address, self._registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise PrimusError(
                        f"prometheus: {address}:{port} cannot be used: {error.strerror}", "set port or address"
                    ) from None
                continue
            taken = "" if port == first else f" (port {first} is in use)"
            url = f"http://{observed.host}:{port}/metrics"
            observed.say(f"metrics for Prometheus: {url}{taken}")
            observed.append_event("metrics_endpoint", url=url)
            return server
        observed.say(f"no metrics for Prometheus: ports {first} to {port} of {address} are in use; the run goes on")
        return None

    def _write_file(self) -> None:
        if self._file is not None:
            from prometheus_client import generate_latest

            write_text(self._file, generate_latest(self._registry).decode())


def open_observer(options: Options, observed: ObservedRun) -> PrometheusObserver:
    """Start the endpoint."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UnfitError(
            "observers: prometheus needs the package prometheus-client",
            f"{PROGRAM} setup --with prometheus-client",
        ) from None
    return PrometheusObserver(options, observed)
