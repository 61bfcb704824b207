"""The Python API: plan and run commands, and read runs as tables, from notebooks and schedulers of one's own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from primus import interpreter, redaction
from primus.cli.dispatch import plan_command
from primus.config.source import ConfigValue, format_yaml_value
from primus.errors import EXIT_OK, EXIT_UNFIT, EXIT_USAGE, PrimusError, UnfitError, UsageError
from primus.launch import launcher_file
from primus.launch.command import parse_command
from primus.plan import redact_plan
from primus.runs import events, store, summary
from primus.runs.files import to_json
from primus.runs.store import Run, RunMetadata

NUM_KEPT_LINES = 40
"""Lines of standard error that are kept for the message of an error."""


def prepare(words: str | Sequence[str], /, **settings: ConfigValue) -> PreparedCommand:
    """Plan a command without starting anything, as `primus-cli --dry-run` does.

    Args:
        words: What is typed behind `primus-cli`, as a string or as words.
        settings: Keys of the experiment that are typed behind it: ``lr=1e-4`` is ``--lr=1e-4``.

    Raises:
        UsageError: The command or its experiment is wrong.
        UnfitError: This machine cannot run it.
    """
    given = shlex.split(words) if isinstance(words, str) else list(words)
    given += [f"--{key}={_format_setting(value)}" for key, value in settings.items()]
    ours, choice = launcher_file.take_choice(given)
    with redaction.scope():
        redaction.learn(os.environ)
        redaction.learn_args(given)
        command = launcher_file.apply_defaults(parse_command(ours), choice, os.environ)
        if command.is_help or not command.request.task:
            raise UsageError("prepare() needs a command with a task", "for example direct -- runs list")
        dry = structs.replace(command, options=structs.replace(command.options, dry_run=True))
        planned = plan_command(dry, tuple(given), os.environ)
        return PreparedCommand(
            tuple(given), json.loads(to_json(redact_plan(planned.plan))), redaction.redact(planned.text)
        )


def _format_setting(value: ConfigValue) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else format_yaml_value(value)


class PreparedCommand:
    """A command that was planned; printing it shows what `--dry-run` shows."""

    def __init__(self, words: tuple[str, ...], plan: dict[str, Any], text: str) -> None:
        self.words = words
        """Words behind `primus-cli`."""
        self.plan = plan
        """What each level of the command starts, as `--dry-run --json` prints it; secrets are masked."""
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"PreparedCommand({shlex.join(redaction.redact_args(self.words))!r})"

    def start(self, *, quiet: bool = False) -> RunningCommand:
        """Start it as a process of its own, which supervises the run as the command line does.

        Args:
            quiet: Whether its progress is not copied to standard error.
        """
        return RunningCommand(self.words, quiet=quiet)

    def run(self, timeout_s: float | None = None, *, quiet: bool = False) -> CommandOutcome:
        """Start it, and wait for its end; see `RunningCommand.wait`. It is stopped when the time is over."""
        running = self.start(quiet=quiet)
        try:
            return running.wait(timeout_s)
        except BaseException:
            running.stop()
            raise


class RunningCommand:
    """A command that was started."""

    def __init__(self, words: Sequence[str], *, quiet: bool = False) -> None:
        command = interpreter.build_module_command(sys.executable, "primus", *words, "--json")
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._lines: deque[str] = deque(maxlen=NUM_KEPT_LINES)
        self._output: list[str] = []
        # Both pipes are drained while the command runs: a full one would stop it.
        self._readers = [
            threading.Thread(target=self._copy_errors, args=(quiet,), daemon=True),
            threading.Thread(target=self._read_output, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _copy_errors(self, quiet: bool) -> None:
        assert self.process.stderr
        with self.process.stderr as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                if not quiet:
                    print(line, end="", file=sys.stderr, flush=True)

    def _read_output(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            self._output += lines

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ask it to end as SIGTERM does: workers save and end; after `timeout_s` it is killed."""
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._join_readers()

    def wait(self, timeout_s: float | None = None) -> CommandOutcome:
        """Wait for its end.

        Raises:
            TimeoutError: It still runs after `timeout_s`, and goes on.
            PrimusError: It failed; UsageError and UnfitError by its exit code. The message is that of the command.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the command still runs after {timeout_s:g} s") from None
        self._join_readers()
        result = CommandOutcome(code, _read_value("".join(self._output)))
        if code != EXIT_OK:
            raise _make_error(code, list(self._lines))
        return result

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join()


class CommandOutcome:
    """How a command ended."""

    def __init__(self, exit_code: int, value: Any) -> None:
        self.exit_code = exit_code
        self.value = value
        """What the command prints under `--json`."""

    @property
    def run(self) -> RecordedRun:
        """The run that the command made.

        Raises:
            PrimusError: It made none.
        """
        place = self.value.get("run") if isinstance(self.value, dict) else None
        if not isinstance(place, str):
            raise PrimusError("the command made no run", "its result is in .value")
        return RecordedRun(Run(Path(place)))


def _read_value(text: str) -> Any:
    """The JSON value that a command prints last, behind the lines of rank 0; None if it prints none."""
    for begin in reversed([match.start() for match in re.finditer(r"^[\[{\"]", text, re.MULTILINE)]):
        with contextlib.suppress(ValueError):
            return json.loads(text[begin:])
    return None


def _make_error(code: int, lines: list[str]) -> PrimusError:
    """The error that the command reported last, with its exit code."""
    begins = [index for index, line in enumerate(lines) if line.startswith("primus-cli: ")]
    message = lines[begins[-1] :] if begins else [f"the command ended with exit code {code}", *lines[-3:]]
    kinds: dict[int, type[PrimusError]] = {EXIT_USAGE: UsageError, EXIT_UNFIT: UnfitError}
    hint = "\n".join(line.strip() for line in message[1:] if line.startswith("  "))
    error = kinds.get(code, PrimusError)(message[0].removeprefix("primus-cli: "), hint)
    error.exit_code = code
    return error


def open_runs(folder: str | os.PathLike[str] = "output", experiment: str | None = None) -> RunCollection:
    """The runs of a workspace, or of one experiment in it, oldest first; damaged ones included."""
    workspace = Path(folder)
    runs = store.list_runs(workspace / experiment) if experiment else store.list_workspace_runs(workspace)
    return RunCollection(map(RecordedRun, runs))


def open_run(name: str | os.PathLike[str], folder: str | os.PathLike[str] = "output") -> RecordedRun:
    """A run by its folder, its id or a prefix of it, or its experiment (the newest run).

    Raises:
        UsageError: No run matches, or several do.
    """
    return RecordedRun(store.find_run(os.fspath(name), Path(folder)))


class RecordedRun:
    """What a run folder holds; every call reads it again, so that a run may be watched while it trains."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def id(self) -> str:
        return self._run.id

    @property
    def directory(self) -> Path:
        return self._run.directory

    def __repr__(self) -> str:
        return f"RecordedRun({str(self.directory)!r})"

    def read_summary(self) -> summary.RunSummary:
        """State, steps, losses, speed and size, as `runs list` shows them."""
        return summary.summarize_run(self._run)

    def read_metadata(self) -> RunMetadata:
        """Command, user, machine, version and outcome.

        Raises:
            PrimusError: It is missing or damaged.
        """
        return self._run.read_metadata()

    def read_settings(self) -> dict[str, Any]:
        """Every value of the configuration by flat key; empty if the run has none."""
        return summary.flatten_run_settings(self._run)

    def read_events(self) -> list[events.Event]:
        """All events in order; see docs/run-folder.md."""
        return list(events.read_events(self._run.events))

    def read_steps(self, *, as_lists: bool = False) -> dict[str, Any]:
        """Columns of the steps by name, such as ``step``, ``loss``, ``tokens_per_s``; empty without steps.

        NumPy arrays, in which a missing number is nan; lists with None where NumPy is not installed or `as_lists`.
        """
        steps = events.read_steps(self._run.events)
        names = {name: None for step in steps for name, value in step.items() if _is_number(value)}
        columns = {name: [step.get(name) if _is_number(step.get(name)) else None for step in steps] for name in names}
        if as_lists:
            return columns
        try:
            import numpy
        except ImportError:
            return columns
        whole = {name for name, column in columns.items() if all(isinstance(each, int) for each in column)}
        return {name: numpy.array(column, dtype=int if name in whole else float) for name, column in columns.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class RunCollection(Sequence[RecordedRun]):
    """Runs in order, found by position, or by a prefix of the id or the name of the experiment (its newest run)."""

    def __init__(self, runs: Iterator[RecordedRun]) -> None:
        self._runs = list(runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return RunCollection(iter(self._runs[key])) if isinstance(key, slice) else self._runs[key]
        found = [run for run in self._runs if run.id.startswith(key) or run.directory.parent.name == key]
        if not found:
            raise KeyError(key)
        return found[-1]

    def read_rows(self) -> list[dict[str, Any]]:
        """A row for each run with the columns of `runs list`, as pandas.DataFrame takes them."""
        return [structs.asdict(run.read_summary()) for run in self._runs]
