"""The load of this machine while a cell runs: clocks, power, energy, throttling, and other processes.

A thread of the harness samples once a second. A sample of a machine without GPUs costs less than a millisecond of one
CPU; GPUs are asked less often, since a management tool takes up to two seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from primus.comparison.results.result import LoadSample, ResultLoad
from primus.machine import health
from primus.machine.facts import MachineFacts
from primus.machine.health import DeviceHealth
from primus.machine.host.kernel_counters import compute_other_share, read_cpu_times

HOST_INTERVAL_S, DEVICE_INTERVAL_S = 1.0, 5.0
MOST_SAMPLES = 600
"""Samples that a result keeps; of more, every second one is dropped, again and again."""
POWERCAP = Path("/sys/class/powercap")
"""Counters of RAPL (Linux, Documentation/power/powercap/powercap.rst); often readable by root alone."""
CPUS = Path("/sys/devices/system/cpu")
CLOCKS = "cpu[0-9]*/cpufreq/scaling_cur_freq"
THROTTLING = "cpu[0-9]*/thermal_throttle/core_throttle_count"


class LoadRecorder:
    """Samples the machine from `__enter__` to `__exit__`.

    Args:
        facts: This machine.
        environ: Variables for the management tools.
    """

    def __init__(self, facts: MachineFacts, environ: Mapping[str, str]) -> None:
        self._facts, self._environ = facts, environ
        self._energy = EnergyCounter(POWERCAP)
        # Set once, by the harness; it also interrupts the wait between two samples.
        self._is_over = threading.Event()
        # Only the thread appends. The harness reads after it has ended, or copies what is there if it hangs.
        self._samples: list[LoadSample] = []
        self._foreign: dict[str, None] = {}
        self._energy_source = ""
        self._thread = threading.Thread(target=self._run_sampling, name="machine-load", daemon=True)
        self._began = self._ended = (0.0, 0.0, 0.0)

    def __enter__(self) -> LoadRecorder:
        # Before the run starts, so that no process is its own.
        self._devices = self._read_devices(is_running=False)
        self._began = read_cpu_times()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = read_cpu_times()
        self._is_over.set()
        self._thread.join(DEVICE_INTERVAL_S)  # a management tool that hangs must not delay the next cell

    def summarize_load(self) -> ResultLoad:
        """What was seen; called after the run and all its processes have ended."""
        return ResultLoad(
            samples=list(self._samples),
            other_cpu_share=compute_other_share(self._began, self._ended, os.cpu_count() or 1),
            other_gpu_processes=list(self._foreign),
            energy_source=self._energy_source or ("rapl" if self._energy.domains else ""),
        )

    def _run_sampling(self) -> None:
        throttled_before, next_reading_s = count_throttling(), time.monotonic() + DEVICE_INTERVAL_S
        devices = self._devices
        # At least one sample, however short the run is.
        while not self._samples or not self._is_over.is_set():
            taken = time.time()
            if self._facts.devices and time.monotonic() >= next_reading_s:
                devices = self._read_devices(is_running=True)
                next_reading_s = time.monotonic() + DEVICE_INTERVAL_S
                # Counters of energy are read somewhere in the second or two that the tools take.
                taken = (taken + time.time()) / 2
            throttled = count_throttling()
            # Values of devices are in the sample that read them: repeated ones would be of another time.
            sample = _build_sample(taken, self._energy.read_joules(), devices, throttled > throttled_before)
            self._samples.append(sample)
            throttled_before, devices = throttled, ()
            if len(self._samples) > MOST_SAMPLES:
                del self._samples[1::2]
            self._is_over.wait(HOST_INTERVAL_S)
        self._read_devices(is_running=False)

    def _read_devices(self, *, is_running: bool) -> Sequence[DeviceHealth]:
        """Live values of the GPUs; without the run, processes that hold their memory are those of others."""
        if not self._facts.devices:
            return ()
        devices = health.read_health(self._facts, self._environ, with_energy=True).devices
        for device in devices:
            sources = device.sources
            self._energy_source = sources.get("energy_j") or sources.get("power_w") or self._energy_source
            for process in () if is_running else device.processes or ():
                # A daemon that watches the devices holds none of their memory.
                if process.memory_bytes != 0:
                    self._foreign[f"{process.name or 'process'} {process.pid}"] = None
        return devices


class EnergyCounter:
    """The energy of all CPU packages since the first reading; counters that wrap around are followed."""

    def __init__(self, folder: Path) -> None:
        # The domain of a package contains those of its cores; `psys` contains the packages.
        packages = [path.parent for path in sorted(folder.glob("intel-rapl:*/name")) if _is_package(path)]
        self.domains = [package for package in packages if _read_number(package / "energy_uj") is not None]
        self._last: dict[Path, float] = {}
        self._total_uj = 0.0

    def read_joules(self) -> float | None:
        """Joules; None if no counter can be read."""
        for domain in self.domains:
            value = _read_number(domain / "energy_uj")
            if value is None:
                continue
            step = value - self._last.get(domain, value)
            # The counter has wrapped around, at most once: at 1 kW a range of 262 kJ takes four minutes.
            self._total_uj += step if step >= 0 else step + (_read_number(domain / "max_energy_range_uj") or 0.0)
            self._last[domain] = value
        return self._total_uj / 1e6 if self.domains else None


def _is_package(path: Path) -> bool:
    try:
        return path.read_text().startswith("package")
    except OSError:
        return False


def count_throttling() -> int:
    """How often the kernel has throttled the CPUs since it was started."""
    return sum(int(_read_number(path) or 0) for path in CPUS.glob(THROTTLING))


def _build_sample(
    taken: float, joules: float | None, devices: Sequence[DeviceHealth], is_throttled: bool
) -> LoadSample:
    clocks = [value / 1000 for path in CPUS.glob(CLOCKS) if (value := _read_number(path))]
    reasons = {reason for device in devices for reason in device.throttle or ()}
    return LoadSample(
        time=round(taken, 3),
        host_energy_j=joules,
        cpu_mhz=round(sum(clocks) / len(clocks), 1) if clocks else None,
        load=os.getloadavg()[0],
        device_clock_mhz=[device.clock_mhz for device in devices],
        device_power_w=[device.power_w for device in devices],
        device_power_limit_w=[device.power_cap_w for device in devices],
        device_energy_j=[device.energy_j for device in devices],
        device_temperature_c=[device.temperature_c for device in devices],
        throttled=sorted(reasons | ({"cpu thermal"} if is_throttled else set())),
    )


def _read_number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
