"""Records a window of steps, by torch.profiler or jax.profiler, as Chrome traces in the run folder.

States of a process: before the window, recording, written. Recording begins before the first step of the window. It
ends at the first moment after its last step: then the files are written, and all processes wait for each other, so
that no step is measured with the time of the writing.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tempfile
import time
from abc import abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from primus import registry
from primus.callback import Callback, ProfileReport
from primus.config.schema import LoggingConfig
from primus.framework import FRAMEWORKS
from primus.session.profile.profile_window import ProfileWindow, choose_recording_ranks, find_profile_window
from primus.session.training_run import TrainingRun

COMPRESSION_LEVEL = 1
"""Traces shrink to a tenth at the lowest level already, and training waits."""


class Recorder(Protocol):
    """A profiler of one library."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def open_span(self, name: str) -> AbstractContextManager[object]:
        """A named span of the host."""

    @abstractmethod
    def stop(self) -> None:
        """End the recording; waits for the device, so that all kernels of the steps are recorded."""

    @abstractmethod
    def write_files(self, folder: Path) -> list[tuple[Path, str]]:
        """Write what was recorded to new files in `folder`; gives each with the suffix of its name."""


class StepProfiler(Callback):
    """Records the window of a run, and calls `after_profile` of the other callbacks."""

    def __init__(
        self,
        run: TrainingRun,
        window: ProfileWindow,
        recorder: Recorder | None,
        *,
        is_compressed: bool,
    ) -> None:
        self._run, self._attempt = run, run.attempt
        self._window, self._recorder, self._is_compressed = window, recorder, is_compressed
        self._step = run.step
        """Steps taken; at a rewind still those before it."""
        self._is_open = False
        self._span = ExitStack()

    def before_step(self) -> None:
        self._finish_window()
        if self._step + 1 == self._window.first:
            # In processes that do not record as well: all wait for the files at the end of the window.
            self._is_open = True
            if self._recorder is not None:
                self._recorder.start()
                self._run.open_span = self._recorder.open_span
        if self._is_open and self._recorder is not None:
            # The name by which TensorBoard, TraceLens and HolisticTraceAnalysis find steps.
            self._span.enter_context(self._recorder.open_span(f"ProfilerStep#{self._step + 1}"))

    def after_step(self) -> None:
        self._step += 1
        self._span.close()

    def before_evaluation(self) -> None:
        self._finish_window()

    def before_save(self) -> None:
        self._finish_window()

    def after_rewind(self, step: int) -> None:
        self._finish_window(is_cut=True)
        self._step = step

    def after_train(self) -> None:
        self._finish_window(is_cut=True)

    def close(self) -> None:
        self._span.close()
        # After an error a peer may be gone, and stopping would wait for its part of a collective on the device.
        if self._is_open and sys.exc_info()[0] is None:
            self._finish_window(is_cut=True, waits=False)

    def _finish_window(self, *, is_cut: bool = False, waits: bool = True) -> None:
        """Write the profile if the last step of the window is over, or the window is cut short.

        Args:
            is_cut: Whether the window ends now in any case.
            waits: Whether to wait for the other processes.
        """
        if not self._is_open or not (is_cut or self._step >= self._window.last):
            return
        # Closed before anything can fail: `close` after an error must not write a second time.
        self._is_open = False
        self._span.close()
        started = time.perf_counter()
        self._attempt.beat("profile", self._step)
        suffixes = self._write_profile()
        if waits:
            self._run.processes.all_reduce_max(0)  # a barrier
        report = ProfileReport(
            first_step=self._window.first,
            last_step=min(self._step, self._window.last),
            ranks=list(self._window.ranks),
            files=[
                self._window.name_file(self._attempt.number, rank) + suffix
                for rank in self._window.ranks
                for suffix in suffixes or self._list_usual_suffixes()
            ],
            time_s=round(time.perf_counter() - started, 3),
        )
        self._run.callbacks.call("after_profile", report)

    def _list_usual_suffixes(self) -> list[str]:
        """Suffixes of the files that other processes write."""
        return [".json.gz" if self._is_compressed else ".json"]

    def _write_profile(self) -> list[str]:
        """Write the files of this process; gives their suffixes."""
        if self._recorder is None:
            return []
        self._run.open_span = nullcontext
        self._recorder.stop()
        base = self._attempt.run.directory / self._window.name_file(self._attempt.number, self._attempt.rank)
        base.parent.mkdir(parents=True, exist_ok=True)
        suffixes = []
        with tempfile.TemporaryDirectory(dir=base.parent, prefix=".partial-") as folder:
            for file, suffix in self._recorder.write_files(Path(folder)):
                if self._is_compressed and suffix == ".json":
                    file, suffix = _compress_file(file), ".json.gz"
                os.replace(file, base.with_name(base.name + suffix))
                suffixes.append(suffix)
        return suffixes


class TorchRecorder:
    """torch.profiler: operators of the host, and kernels of AMD and NVIDIA GPUs."""

    def __init__(self, config: LoggingConfig) -> None:
        self._config = config
        self._profile: Any = None

    def start(self) -> None:
        from torch.profiler import profile

        self._profile = profile(
            record_shapes=self._config.torch_profiler_record_shapes,
            with_stack=self._config.torch_profiler_with_stack,
            profile_memory=self._config.profile_memory,
        )
        self._profile.start()

    def open_span(self, name: str) -> AbstractContextManager[object]:
        from torch.profiler import record_function

        return record_function(name)

    def stop(self) -> None:
        self._profile.stop()

    def write_files(self, folder: Path) -> list[tuple[Path, str]]:
        recorded, self._profile = self._profile, None
        path = folder / "trace.json"
        recorded.export_chrome_trace(str(path))
        return [(path, ".json")]


class JaxRecorder:
    """jax.profiler: a Chrome trace, and the same for XProf."""

    def __init__(self) -> None:
        self._folder = Path()

    def start(self) -> None:
        import jax

        self._folder = Path(tempfile.mkdtemp(prefix="primus-profile-"))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python, which slows the steps down
        jax.profiler.start_trace(str(self._folder), profiler_options=options)

    def open_span(self, name: str) -> AbstractContextManager[object]:
        import jax

        return jax.profiler.TraceAnnotation(name)  # type: ignore[no-any-return]

    def stop(self) -> None:
        import jax

        jax.profiler.stop_trace()

    def write_files(self, folder: Path) -> list[tuple[Path, str]]:
        # <folder>/plugins/profile/<time>/<host>.trace.json.gz and <host>.xplane.pb (docs.jax.dev, profiling).
        found = [
            (Path(shutil.copy(file, folder)), ours)
            for suffix, ours in ((".trace.json.gz", ".json.gz"), (".xplane.pb", ".xplane.pb"))
            for file in self._folder.rglob(f"*{suffix}")
        ]
        shutil.rmtree(self._folder, ignore_errors=True)
        return found


def build_profiler(run: TrainingRun) -> StepProfiler | None:
    """The profiler of one process; None if the experiment records no profile, or the run is past its first step.

    Raises:
        UsageError: A rank does not exist.
    """
    trainer, attempt = run.trainer, run.attempt
    asked = find_profile_window(trainer)
    if asked is None:
        return None
    window = replace(asked, ranks=choose_recording_ranks(asked, run.processes.world))
    if run.step >= window.first:
        attempt.say(f"profile: the run resumes after step {run.step}: steps {window.first} to {window.last} are over")
        return None
    uses_torch = registry.load_plug_in(FRAMEWORKS, trainer.framework).USES_TORCH
    recorder = TorchRecorder(trainer.logging) if uses_torch else JaxRecorder()
    return StepProfiler(
        run,
        window,
        recorder if attempt.rank in window.ranks else None,
        is_compressed=trainer.logging.torch_profiler_use_gzip or not uses_torch,
    )


def _compress_file(path: Path) -> Path:
    compressed = path.with_name(path.name + ".gz")
    with path.open("rb") as source, gzip.open(compressed, "wb", compresslevel=COMPRESSION_LEVEL) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    path.unlink()
    return compressed
