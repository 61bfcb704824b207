"""Clocks, power, heat and throttling of the cards of a node, sampled while its devices are loaded."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from primus.machine import devices as visible
from primus.machine import health
from primus.machine.facts import MachineFacts
from primus.machine.health import DeviceHealth
from primus.machine.measurements import Telemetry

INTERVAL_S = 5.0
"""A management tool takes up to a second or two for all cards of a node."""
SAMPLES = 6
"""At least so many, where the time is short."""

Read = Callable[[], Sequence[DeviceHealth]]


def create_reader(facts: MachineFacts, environ: Mapping[str, str]) -> Read:
    """Reads the cards that this process may use, of which some partition may be hidden."""
    used = set(visible.list_usable_devices(facts, environ))
    cards = {card.index for card in facts.devices if used & set(card.partitions)}
    return lambda: [one for one in health.read_health(facts, environ).devices if one.index in cards]


class TelemetrySampler:
    """Samples in a thread of its own from `__enter__` to `__exit__`.

    The first sample comes after one interval, when the load has taken hold. A reading that fails is left out; the
    thread is a daemon, so that a tool that hangs does not hold up the end.
    """

    def __init__(self, read: Read, duration_s: float) -> None:
        self._read = read
        self._interval_s = min(INTERVAL_S, duration_s / SAMPLES)
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
        self._is_over.set()
        self._thread.join(self._interval_s)

    def summarise_telemetry(self) -> tuple[Telemetry, ...]:
        """What was sampled so far, by card."""
        with self._lock:
            return tuple(summarise_device(card, samples) for card, samples in sorted(self._samples.items()))

    def _run_sampling(self) -> None:
        while not self._is_over.wait(self._interval_s):
            read = self._read()
            if self._is_over.is_set():  # the load ended while the tool was asked
                return
            with self._lock:
                for one in read:
                    self._samples.setdefault(one.index, []).append(one)


def summarise_device(card: int, samples: Sequence[DeviceHealth]) -> Telemetry:
    """The samples of one card."""
    clocks = [one.clock_mhz for one in samples if one.clock_mhz is not None]
    powers = [one.power_w for one in samples if one.power_w is not None]
    heats = [one.temperature_c for one in samples if one.temperature_c is not None]
    errors = [one.ecc_uncorrectable for one in samples if one.ecc_uncorrectable is not None]
    throttled = Counter(reason for one in samples for reason in one.throttle or ())
    return Telemetry(
        card=card,
        num_samples=len(samples),
        clock_min_mhz=min(clocks, default=None),
        clock_mean_mhz=sum(clocks) / len(clocks) if clocks else None,
        power_mean_w=sum(powers) / len(powers) if powers else None,
        power_max_w=max(powers, default=None),
        temperature_max_c=max(heats, default=None),
        throttled=dict(sorted(throttled.items())),
        new_uncorrectable=max(0, errors[-1] - errors[0]) if errors else None,
    )
