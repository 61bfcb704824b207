"""Clocks, power, temperature and throttling of a node's GPUs, sampled under load."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from primus.machine import devices as visible
from primus.machine import health
from primus.machine.facts import MachineFacts
from primus.machine.health import DeviceHealth
from primus.machine.measurements import Telemetry
from primus.machine.probe import probe

INTERVAL_S = 5.0
"""Sampling interval: a management tool takes up to two seconds for all GPUs of a node."""
SAMPLES = 6
"""Minimum number of samples in a short test."""

Read = Callable[[], Sequence[DeviceHealth]]


def create_reader(facts: MachineFacts, environ: Mapping[str, str]) -> Read:
    """Returns a function that reads the GPUs of which this process may use a partition."""
    used = set(visible.list_usable_devices(facts, environ))
    gpus = {gpu.index for gpu in facts.devices if used & set(gpu.partitions)}
    return lambda: [one for one in health.read_health(facts, environ).devices if one.index in gpus]


def create_sampler(local_rank: int, device: str, duration_s: float) -> TelemetrySampler | None:
    """The sampler of a node's GPUs, on its first rank; None on others, and for a `device` that is a CPU."""
    if local_rank or device == "cpu":
        return None
    return TelemetrySampler(create_reader(probe(environ=os.environ), os.environ), duration_s)


class TelemetrySampler:
    """Samples in a thread from `__enter__` to `__exit__`.

    The first sample is taken after one interval, when the load is stable. Failed readings are skipped. The thread is a
    daemon, so that a hung tool does not delay the exit.
    """

    def __init__(self, read: Read, duration_s: float) -> None:
        self._read = read
        self._interval_s = min(INTERVAL_S, duration_s / SAMPLES)
        # The thread appends samples while the test reads summaries after each window: `_lock` protects `_samples`.
        # `_is_over` is set once and ends the thread; it also interrupts the wait between two samples.
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._samples: dict[int, list[DeviceHealth]] = {}
        self._thread = threading.Thread(target=self._run_sampling, daemon=True)

    def __enter__(self) -> TelemetrySampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A hung tool must not delay the tests: after one interval the daemon thread is abandoned.
        self._is_over.set()
        self._thread.join(self._interval_s)

    def summarize_telemetry(self) -> tuple[Telemetry, ...]:
        """Summary of the samples so far, by GPU."""
        with self._lock:
            return tuple(summarize_device(gpu, samples) for gpu, samples in sorted(self._samples.items()))

    def _run_sampling(self) -> None:
        while not self._is_over.wait(self._interval_s):
            # Outside the lock: a reading takes seconds, and summaries must not wait for it.
            read = self._read()
            if self._is_over.is_set():  # the load ended while the tool ran: not a sample under load
                return
            with self._lock:
                for one in read:
                    self._samples.setdefault(one.index, []).append(one)


def summarize_device(gpu: int, samples: Sequence[DeviceHealth]) -> Telemetry:
    """The samples of one GPU."""
    clocks = [one.clock_mhz for one in samples if one.clock_mhz is not None]
    powers = [one.power_w for one in samples if one.power_w is not None]
    heats = [one.temperature_c for one in samples if one.temperature_c is not None]
    errors = [one.ecc_uncorrectable for one in samples if one.ecc_uncorrectable is not None]
    throttled = Counter(reason for one in samples for reason in one.throttle or ())
    return Telemetry(
        gpu=gpu,
        num_samples=len(samples),
        clock_min_mhz=min(clocks, default=None),
        clock_mean_mhz=sum(clocks) / len(clocks) if clocks else None,
        power_mean_w=sum(powers) / len(powers) if powers else None,
        power_max_w=max(powers, default=None),
        temperature_max_c=max(heats, default=None),
        throttled=dict(sorted(throttled.items())),
        new_uncorrectable=max(0, errors[-1] - errors[0]) if errors else None,
    )
