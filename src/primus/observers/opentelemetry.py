"""Metrics of a run by OpenTelemetry: sent by OTLP over HTTP to a collector.

The variables of OpenTelemetry apply, such as OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS (which may hold a
token, and is never written anywhere) and OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from primus.errors import UnfitError
from primus.observer import Observer
from primus.package_files import PROGRAM
from primus.redaction import redact

if TYPE_CHECKING:
    from primus.messages import Say
    from primus.observer import ObservedRun
    from primus.runs.events import Event
    from primus.runs.run_metrics import RunMetrics

LAST_EXPORT_S = 5.0
"""Longest wait for the collector at the end of the run."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `opentelemetry`."""

    endpoint: str | None = None
    """Address of the collector, such as http://collector:4318; default: the variables of OpenTelemetry, then
    http://localhost:4318."""
    interval_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds between two exports."""


class OpenTelemetryObserver(Observer):
    """Has the SDK of OpenTelemetry export the newest metrics, from a thread of its own."""

    def __init__(self, options: Options, observed: ObservedRun) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        self._metrics: RunMetrics | None = None
        self._known: set[str] = set()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(_SayOnce(observed.say))
        logger.propagate = False
        endpoint = f"{options.endpoint.rstrip('/')}/v1/metrics" if options.endpoint else None
        # The SDK does not wait for a collector that is away for longer than this, at the end either.
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=endpoint, timeout=LAST_EXPORT_S),
            export_interval_millis=1000 * options.interval_s,
        )
        names = {
            "service.name": "primus",
            "service.instance.id": observed.run.id,
            "host.name": observed.host,
            "primus.experiment": observed.name,
            "primus.run": observed.run.id,
        }
        self._provider = MeterProvider([reader], resource=Resource.create(names), shutdown_on_exit=False)
        self._meter = self._provider.get_meter("primus")

    def observe(self, events: Sequence[Event], metrics: RunMetrics) -> None:
        self._metrics = metrics
        for each in metrics.list_metrics():
            if each.name not in self._known:
                self._known.add(each.name)
                name = f"primus.{each.name.removesuffix('_total')}"
                create: Any = (
                    self._meter.create_observable_counter
                    if each.kind == "counter"
                    else self._meter.create_observable_gauge
                )
                create(name, [self._make_reader(each.name)], each.unit, each.description)

    def close(self) -> None:
        self._provider.shutdown(timeout_millis=1000 * LAST_EXPORT_S)  # exports once more

    def _make_reader(self, name: str) -> Any:
        def read(_: object) -> Iterable[Any]:
            from opentelemetry.metrics import Observation

            assert self._metrics is not None
            return [Observation(each.value) for each in self._metrics.list_metrics() if each.name == name]

        return read


class _SayOnce(logging.Handler):
    """Prints each problem of the SDK once, in one line: a collector that is away would fill the log."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg) not in self._said:  # the text before its values, which change with each try
            self._said.add(str(record.msg))
            text = redact(record.getMessage().partition("\n")[0])
            self._say(f"observer opentelemetry: {text}; the run goes on")


def open_observer(options: Options, observed: ObservedRun) -> OpenTelemetryObserver:
    """Start to export."""
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.metrics  # noqa: F401
    except ImportError:
        raise UnfitError(
            "observers: opentelemetry needs the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http",
            f"{PROGRAM} setup --with opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        ) from None
    return OpenTelemetryObserver(options, observed)
