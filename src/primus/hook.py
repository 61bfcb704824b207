"""What authors of Python hooks import, and `python -m primus.hook`, which runs one of their files.

    from primus.hook import HookContext, Settings, Stop, hook

    @hook
    def quiet(context: HookContext) -> Settings:
        return Settings(env={"NCCL_DEBUG": "WARN"}, extra={"log_interval": 10})

The decorator is a declaration that is read from the file's text; its arguments are plain values. A file without
decorated functions is a script: it speaks by lines on its standard output, see `primus.launch.hooks.scripts`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, get_args, overload

import msgspec
from msgspec import Struct

Stage = Literal["before", "after", "failure"]
STAGES: tuple[Stage, ...] = get_args(Stage)
RESULT_VARIABLE = "PRIMUS_HOOK_RESULT"
"""Variable that names the private file in which the functions of a hook leave their reply."""

Value = str | int | float | bool
Settle = TypeVar("Settle", bound="Callable[[HookContext], Settings | None]")


class HookContext(Struct, frozen=True, kw_only=True):
    """What a hook may know of the launch that it serves."""

    stage: Stage
    task: str
    """``train pretrain``."""
    words: tuple[str, ...]
    """Words after the task's name."""
    node_rank: int
    nnodes: int
    nproc: int
    """Processes on this node."""
    environ: Mapping[str, str]
    run_directory: Path | None = None
    """Run folder; not known before the nodes have met, except on node 0."""
    config: Path | None = None
    """The resolved experiment, where the task has one."""
    outcome: str | None = None
    """``done``, ``failed`` or ``interrupted``, after the run."""
    exit_code: int | None = None
    reason: str = ""


class Settings(Struct, frozen=True, kw_only=True):
    """What a hook wants set."""

    env: Mapping[str, Value] = {}
    """Variables for the workers; one that the user has set stays."""
    extra: Mapping[str, Value] = {}
    """Settings of the experiment by dotted name; one that the user has typed stays."""


class Stop(Exception):
    """Stops the launch, where a `before` hook raises it.

    Args:
        reason: Why.
        hint: What to do about it; may be empty.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class HookReply(Struct, frozen=True, kw_only=True):
    """What the functions of one file say to the launcher."""

    env: dict[str, str] = {}
    extra: dict[str, str] = {}
    stop: str = ""
    hint: str = ""


@overload
def hook(function: Settle) -> Settle: ...


@overload
def hook(
    *, stage: Stage | None = None, once: bool = False, lock: bool = False, timeout_s: float | None = None
) -> Callable[[Settle], Settle]: ...


def hook(
    function: Settle | None = None,
    *,
    stage: Stage | None = None,
    once: bool = False,
    lock: bool = False,
    timeout_s: float | None = None,
) -> Settle | Callable[[Settle], Settle]:
    """Declares a function as a hook.

    Args:
        function: Takes a HookContext; gives Settings or None.
        stage: When it runs; what the file's folder says where None.
        once: Once per job, on node 0, rather than on each node.
        lock: Alone on its node.
        timeout_s: Time limit in seconds.
    """
    return function if function is not None else lambda decorated: decorated


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the functions ``argv[1]`` (separated by commas) of the file ``argv[0]``; the rest are the task's words."""
    file, names, *words = argv
    context = context_of(environ, words)
    functions = runpy.run_path(file, run_name="primus_hook")
    env: dict[str, str] = {}
    extra: dict[str, str] = {}
    stopped: Stop | None = None
    try:
        for name in names.split(","):
            settings = _check_settings(name, functions[name](context))
            env |= {key: _format_value(value) for key, value in settings.env.items()}
            extra |= {key: _format_value(value) for key, value in settings.extra.items()}
    except Stop as stop:
        stopped = stop
    reply = HookReply(
        env=env, extra=extra, stop=stopped.reason if stopped else "", hint=stopped.hint if stopped else ""
    )
    Path(environ[RESULT_VARIABLE]).write_bytes(msgspec.json.encode(reply))
    return 1 if stopped else 0


def context_of(environ: Mapping[str, str], words: Sequence[str]) -> HookContext:
    """The context that the launcher's variables describe."""
    directory, config, code = (environ.get(f"PRIMUS_{name}") for name in ("RUN_DIR", "CONFIG", "EXIT_CODE"))
    return HookContext(
        stage=msgspec.convert(environ["PRIMUS_HOOK_STAGE"], Stage),
        task=environ["PRIMUS_TASK"],
        words=tuple(words),
        node_rank=int(environ["PRIMUS_NODE_RANK"]),
        nnodes=int(environ["PRIMUS_NNODES"]),
        nproc=int(environ["PRIMUS_NPROC"]),
        environ=environ,
        run_directory=Path(directory) if directory else None,
        config=Path(config) if config else None,
        outcome=environ.get("PRIMUS_OUTCOME"),
        exit_code=int(code) if code else None,
        reason=environ.get("PRIMUS_REASON", ""),
    )


def _check_settings(name: str, result: object) -> Settings:
    if result is None:
        return Settings()
    if not isinstance(result, Settings):
        raise TypeError(f"{name} returned {type(result).__name__}, not primus.hook.Settings or None")
    return result


def _format_value(value: Value) -> str:
    """`value` as a variable or an override is written."""
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    from primus.hook import main as run_file  # the module that hooks import, so that its Stop is theirs

    sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[1])))  # what lies beside it, as for any script
    sys.exit(run_file(sys.argv[1:], os.environ))
