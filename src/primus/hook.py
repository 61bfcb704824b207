"""The contract of Python hooks, what their authors import, and `python -m primus.hook`, which runs one file."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar, get_args, overload

import msgspec
from msgspec import Struct

Stage = Literal["before", "after", "failure"]
STAGES: tuple[Stage, ...] = get_args(Stage)
RESULT_VARIABLE = "PRIMUS_HOOK_RESULT"
"""Variable with the path of the private file to which the functions of a hook write their reply."""

Value = str | int | float | bool
HookT = TypeVar("HookT", bound="Hook")


class HookContext(Struct, frozen=True, kw_only=True):
    """What a hook may know of the launch that runs it."""

    stage: Stage
    """`before`, `after` or `failure`."""
    task: str
    """Name of the task, such as `train pretrain`."""
    words: tuple[str, ...]
    """Words after the task's name."""
    node_rank: int
    """Rank of this node, from 0."""
    nnodes: int
    """Number of nodes."""
    nproc: int
    """Processes on this node."""
    environ: Mapping[str, str]
    """Environment variables of the hook."""
    run_directory: Path | None = None
    """Run folder; None before the rendezvous except on node 0, and for tasks without a run folder."""
    config: Path | None = None
    """File of the resolved experiment; None for tasks without an experiment."""
    outcome: str | None = None
    """`done`, `failed` or `interrupted`; None before the task."""
    exit_code: int | None = None
    """Exit code of the run; None before the task."""
    reason: str = ""
    """Why the run failed or was interrupted."""


class Hook(Protocol):
    """A function that runs before or after a task: decorated with `@hook` in a file `hooks/TASK/NAME.py`.

    The launcher reads the decorator from the text of the file without importing it, so its arguments must be literals:
    `@hook(stage="before", once=True, lock=True, timeout_s=60)`. The decorated functions of a file run in one process of
    their own, in the order of their definition. A file without decorated functions is a script, which sets variables by
    lines on its standard output.
    """

    def __call__(self, context: HookContext, /) -> Settings | None:
        """Do the work of the hook.

        Called on each node, or once per job on node 0 with `once=True`. A `before` hook may return settings. Raise
        `Stop(reason, hint)` in a `before` hook to stop the launch. Any other exception stops the launch too, and is
        reported with the log of the hook. An exception of an `after` or `failure` hook is reported on standard error
        and does not change the exit code.
        """
        ...


class Settings(Struct, frozen=True, kw_only=True):
    """What a `before` hook sets."""

    env: Mapping[str, Value] = {}
    """Variables for the workers; a variable that the user has set keeps its value."""
    extra: Mapping[str, Value] = {}
    """Keys of the experiment by dotted name; a key on the command line keeps its value."""


class Stop(Exception):
    """Stops the launch; raised by a `before` hook.

    Args:
        reason: Why the launch stops.
        hint: How to fix it; may be empty.
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
def hook(function: HookT) -> HookT: ...


@overload
def hook(
    *, stage: Stage | None = None, once: bool = False, lock: bool = False, timeout_s: float | None = None
) -> Callable[[HookT], HookT]: ...


def hook(
    function: HookT | None = None,
    *,
    stage: Stage | None = None,
    once: bool = False,
    lock: bool = False,
    timeout_s: float | None = None,
) -> HookT | Callable[[HookT], HookT]:
    """Declare a function as a hook.

    Args:
        function: Takes a HookContext; returns Settings or None.
        stage: When it runs; None means the stage of the folder that holds the file.
        once: Run once per job, on node 0, instead of on each node.
        lock: Run while no other hook with `lock` of the same user runs on the node.
        timeout_s: Time limit in seconds.
    """
    return function if function is not None else lambda decorated: decorated


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the functions ``argv[1]`` (separated by commas) of the file ``argv[0]``; the rest are the task's words."""
    file, names, *words = argv
    context = build_hook_context(environ, words)
    functions = runpy.run_path(file, run_name="primus_hook")
    env: dict[str, str] = {}
    extra: dict[str, str] = {}
    stopped: Stop | None = None
    try:
        for name in names.split(","):
            settings = _run_function(file, name, functions[name], context)
            env |= {key: _format_value(value) for key, value in settings.env.items()}
            extra |= {key: _format_value(value) for key, value in settings.extra.items()}
    except Stop as stop:
        stopped = stop
    reply = HookReply(
        env=env, extra=extra, stop=stopped.reason if stopped else "", hint=stopped.hint if stopped else ""
    )
    Path(environ[RESULT_VARIABLE]).write_bytes(msgspec.json.encode(reply))
    return 1 if stopped else 0


def build_hook_context(environ: Mapping[str, str], words: Sequence[str]) -> HookContext:
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


def _run_function(file: str, name: str, function: Callable[..., object], context: HookContext) -> Settings:
    """Call a hook; a function that does not follow the contract ends the process with a message."""
    import inspect

    contract = f"define {name}(context: HookContext) -> Settings | None (see docs/plug-ins.md)"
    try:
        inspect.signature(function).bind(context)
    except TypeError as error:
        sys.exit(f"{file}: {name}{inspect.signature(function)}: {error}; {contract}")
    result = function(context)
    if result is not None and not isinstance(result, Settings):
        sys.exit(f"{file}: {name} returned {type(result).__name__}, not primus.hook.Settings or None; {contract}")
    return result or Settings()


def _format_value(value: Value) -> str:
    """`value` as a variable or an override is written."""
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    from primus.hook import main as run_file  # the module that hooks import, so that its Stop is theirs

    sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[1])))  # its own folder, as for any script
    sys.exit(run_file(sys.argv[1:], os.environ))
