"""Rewards from a process of their own, with a time limit for each."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from primus.errors import FinalError
from primus.process import set_parent_death_signal
from primus.redaction import is_secret_name

START_S = 60.0
"""Time of the first answer of a process besides its limit: it imports the plug-in, on a busy machine."""


WINDOW = 32
"""Requests that are sent before their answers are read; answers have at most 1 KiB, and a pipe holds 64."""


class CompletionToScore(NamedTuple):
    """A completion, and what it answers."""

    prompt: str
    completion: str
    row: Mapping[str, Any]


class ScoredCompletion(NamedTuple):
    """The rewards of a completion."""

    rewards: dict[str, float]
    """By name, without weights."""
    problems: list[str]
    """Rewards that failed and count as 0."""


class RewardProcess:
    """Computes rewards; a process that hangs or ends is replaced by another one.

    Args:
        names: Of the plug-ins.
        timeout_s: Of each reward.
        on_error: What a failure means.
        pattern: Given to rewards as the column `reward_pattern` of rows that have none.
    """

    def __init__(
        self, names: list[str], timeout_s: float, on_error: Literal["stop", "zero"], pattern: str | None = None
    ) -> None:
        self._names, self._timeout_s, self._on_error, self._pattern = names, timeout_s, on_error, pattern
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def score(self, completions: Sequence[CompletionToScore], beat: Callable[[], None]) -> list[ScoredCompletion]:
        """The rewards of completions.

        Args:
            completions: With what they answer.
            beat: Called after each reward.

        Raises:
            FinalError: A reward fails, and a failure stops the run; names reward, prompt and cause.
        """
        pattern = {} if self._pattern is None else {"reward_pattern": self._pattern}
        asked = [
            {"name": name, "prompt": each.prompt, "completion": each.completion, "row": {**pattern, **each.row}}
            for each in completions
            for name in self._names
        ]
        answers: list[Mapping[str, Any]] = []
        while len(answers) < len(asked):
            # A window at a time: its answers fit into a pipe, so that neither side waits for the other to read.
            begin = len(answers)
            for answer in self._ask(asked[begin : begin + WINDOW]):
                self._check_answer(asked[len(answers)], answer)
                answers.append(answer)
                beat()
        found = []
        for begin in range(0, len(answers), len(self._names)):
            named = list(zip(self._names, answers[begin : begin + len(self._names)], strict=True))
            rewards = {name: answer.get("value", 0.0) for name, answer in named}
            problems = [f"reward {name}: {answer['problem']}" for name, answer in named if "problem" in answer]
            found.append(ScoredCompletion(rewards, problems))
        return found

    def _check_answer(self, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        if "problem" in answer and self._on_error == "stop":
            raise FinalError(
                f"reward {asked['name']}: {answer['problem']} (prompt {asked['prompt'][:80]!r}, completion"
                f" {asked['completion'][:80]!r})",
                "fix the reward or the row, or set reward_on_error: zero",
            )

    def close(self) -> None:
        """End the process, with those that it has started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process, self._received = None, b""

    def _ask(self, requests: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The answers to the first requests: after one that hangs or ends the process, none."""
        limit_s = self._timeout_s
        if self._process is None:
            self._process, limit_s = _start_process(), limit_s + START_S
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"".join(json.dumps(each, default=str).encode() + b"\n" for each in requests))
            self._process.stdin.flush()
            for _ in requests:
                line = self._read_line(limit_s)
                if line is None:
                    self.close()
                    yield {"problem": f"no value within reward_timeout_s {self._timeout_s:g}"}
                    return
                yield json.loads(line)
                limit_s = self._timeout_s
        except (BrokenPipeError, EOFError):
            code = self._process.wait()
            self.close()
            yield {"problem": f"its process ended with code {code}"}

    def _read_line(self, limit_s: float) -> bytes | None:
        """The next line; None if it does not come in time.

        Raises:
            EOFError: The process has ended.
        """
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._received:
            if not select.select([pipe], [], [], limit_s)[0]:
                return None
            data = os.read(pipe, 1 << 16)
            if not data:
                raise EOFError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


def _start_process() -> subprocess.Popen[bytes]:
    environ = {name: value for name, value in os.environ.items() if not is_secret_name(name)}
    # A reward must not take memory of the devices that train.
    environ |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    return subprocess.Popen(
        [sys.executable, "-m", "primus.session.rewards.score_completions"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # so that what it starts ends with it
        preexec_fn=set_parent_death_signal,
    )
