"""Collect Python's garbage at the same steps in every process, so that no rank pauses while others wait."""

from __future__ import annotations

import gc
from typing import Annotated

from msgspec import Meta, Struct

from primus.callback import Callback, TrainingView


class Options(Struct, frozen=True, kw_only=True):
    """Options of `garbage_collector`."""

    interval: Annotated[int, Meta(ge=1)] = 1000
    """Steps between collections; torchtitan's `gc_freq` and OLMo-core's `gc_interval` are the same setting."""


class GarbageCollector(Callback):
    """Switches the automatic collection off: it starts at a different step in each process."""

    def __init__(self, options: Options, training: TrainingView) -> None:
        self._interval, self._training = options.interval, training
        self._was_enabled = gc.isenabled()

    def before_train(self) -> None:
        gc.collect()
        gc.disable()

    def after_step(self) -> None:
        # Generation 1 is short-lived garbage: a full collection would visit every object of the model.
        if self._training.step % self._interval == 0:
            gc.collect(1)

    def close(self) -> None:
        if self._was_enabled:
            gc.enable()


def build(options: Options, training: TrainingView) -> GarbageCollector:
    """The callback for one process."""
    return GarbageCollector(options, training)
