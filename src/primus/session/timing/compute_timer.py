"""The compute time of a process in a step, without the time that it waits for other processes.

In a synchronous step all processes take the same time; the one that the others wait for has the longest compute time.

A measurement is a series of marks, alternately start and stop: `measure_step` surrounds forward and backward passes,
and the functions of FSDP2 that wait for other processes are wrapped to `pause` and `resume`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

INTERVAL_S = 1.0
"""On a GPU one step in this interval is measured: heartbeats are written as often."""
WAITS = ("wait_for_unshard", "post_backward")
"""Methods of FSDP2's parameter groups in which the compute stream waits for other processes
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)."""
WAITS_ON_CPU = ("unshard", *WAITS)
"""Collectives of gloo are synchronous, so gathering waits as well."""
END = "finalize_backward"
"""Follows the last computation of a backward pass: waits until all gradients are reduced."""


class ComputeTime(Protocol):
    """The measured time of one step."""

    @abstractmethod
    def seconds(self) -> float:
        """The time; on a GPU the step must be over."""


class ComputeTimer:
    """Measures the forward and backward passes of one process.

    Args:
        device: Of the process; on a GPU events are recorded in its stream, and read later without waiting.
        model: Already sharded, if there are several processes.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self._is_measuring = False
        self._due = time.perf_counter() + INTERVAL_S
        self._is_step_measured = True
        self.is_complete = _wrap_waits(model, WAITS if self._on_gpu else WAITS_ON_CPU, self)
        """Whether every wait is wrapped; if not, nothing is measured."""

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Add the duration of a `with` to the time of the step."""
        self._begin_interval()
        try:
            yield
        finally:
            self.stop()

    def pause(self) -> bool:
        """Exclude what follows, until `resume`; returns whether the timer was measuring."""
        # Waits may be nested: the inner one must not resume a timer that the outer one has paused.
        was_measuring = self._is_measuring
        self.stop()
        return was_measuring

    def resume(self) -> None:
        """Measure again, inside `measure_step`."""
        self._begin_interval()

    def stop(self) -> None:
        """Exclude the rest of `measure_step`."""
        # A second stop of a pass is harmless: `finalize_backward` stops before `measure_step` ends.
        if self._is_measuring:
            self._record_mark()
            self._is_measuring = False

    def take_time(self) -> ComputeTime | None:
        """The time since the last call; None if this step was not measured."""
        marks, self._marks = self._marks, []
        now = time.perf_counter()
        # The decision is for the next step: the marks of this one are recorded already.
        was_measured, self._is_step_measured = self._is_step_measured, not self._on_gpu or now >= self._due
        if self._is_step_measured:
            self._due = now + INTERVAL_S
        if not was_measured or not self.is_complete or not marks:
            return None
        # The events of a GPU are read later, when the step is reported and has ended anyway.
        return _DeviceTime(marks) if self._on_gpu else _HostTime(marks)

    def _begin_interval(self) -> None:
        if self.is_complete and self._is_step_measured:
            self._record_mark()
            self._is_measuring = True

    def _record_mark(self) -> None:
        if self._on_gpu:
            # Recorded in the stream: it costs the host microseconds, and is read when the step is reported.
            new_event: Any = torch.cuda.Event
            event = new_event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())


class _HostTime:
    def __init__(self, marks: list[float]) -> None:
        self._seconds = sum(marks[1::2]) - sum(marks[::2])

    def seconds(self) -> float:
        return self._seconds


class _DeviceTime:
    def __init__(self, marks: list[torch.cuda.Event]) -> None:
        self._marks = marks

    def seconds(self) -> float:
        # Starts and stops alternate, so that each pair is one interval of computing.
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        return float(sum(start.elapsed_time(end) for start, end in pairs)) / 1000


def _wrap_waits(model: nn.Module, waits: tuple[str, ...], timer: ComputeTimer) -> bool:
    """Wrap the waiting functions of FSDP2's parameter groups; False if this torch has other names for them."""
    # FSDP2 calls these as attributes of the instances, so that setting them here replaces them for this model only.
    groups = [
        group for module in model.modules() if isinstance(module, FSDPModule) for group in _get_parameter_groups(module)
    ]
    # A wait that is not wrapped would count as computing, and blame the wrong rank: then nothing is measured.
    if any(not callable(getattr(group, name, None)) for group in groups for name in (*waits, END)):
        return False
    for group in groups:
        for name in waits:
            setattr(group, name, _pause_during(getattr(group, name), timer))
        setattr(group, END, _stop_after(getattr(group, END), timer))
    return bool(groups) or not any(isinstance(module, FSDPModule) for module in model.modules())


def _get_parameter_groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of a module: one until torch 2.12, then a list."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def _pause_during(method: Callable[..., Any], timer: ComputeTimer) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        was_measuring = timer.pause()
        try:
            return method(*args, **kwargs)
        finally:
            if was_measuring:
                timer.resume()

    return call


def _stop_after(method: Callable[..., Any], timer: ComputeTimer) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        timer.stop()
        return method(*args, **kwargs)

    return call
