"""Record a few steps with torch.profiler, as traces in the run folder that chrome://tracing and Perfetto open."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from primus.callback import Callback, TrainingView


class Options(Struct, frozen=True, kw_only=True):
    """Options of `profiler`."""

    first_step: Annotated[int, Meta(ge=1)] = 10
    """First step that is recorded; earlier ones compile and fill caches."""
    num_steps: Annotated[int, Meta(ge=1)] = 3
    """Steps that are recorded; ten steps of a large model are gigabytes."""
    ranks: tuple[int, ...] = (0,)
    """Processes that record."""


class Profiler(Callback):
    """Writes `profile/rank_R.step_N.json`; nothing is recorded, and nothing slows down, outside these steps."""

    def __init__(self, options: Options, training: TrainingView) -> None:
        self._options, self._training = options, training
        self._profile: Any = None

    def before_step(self) -> None:
        attempt = self._training.attempt
        if self._training.step + 1 != self._options.first_step or attempt.rank not in self._options.ranks:
            return
        from torch.profiler import profile

        self._profile = profile()
        self._profile.start()

    def after_step(self) -> None:
        if self._profile is not None and self._training.step + 1 >= self._options.first_step + self._options.num_steps:
            self._write_trace()

    def after_rewind(self, step: int) -> None:
        self._write_trace()

    def close(self) -> None:
        self._write_trace()

    def _write_trace(self) -> None:
        """Stop recording; `stop` waits for the device, so that the trace has all kernels of the steps."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        attempt = self._training.attempt
        path = attempt.run.directory / "profile" / f"rank_{attempt.rank}.step_{self._options.first_step}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        recorded.export_chrome_trace(str(partial))
        partial.rename(path)
        self._training.print_line(f"profile of {self._options.num_steps} steps written to {path}")


def build(options: Options, training: TrainingView) -> Profiler:
    """The callback for one process."""
    return Profiler(options, training)
