"""Find the containers that primus has started on this host by their labels, and remove those without a launcher."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from primus import process
from primus.errors import UnfitError
from primus.runtimes.container.engines import ContainerEngine

ENGINE_LIMIT_S = 30.0
"""Time for a command of the engine; a busy daemon takes several seconds."""
LAUNCHER = "primus.launcher"
"""Label with the launcher's process: PID.START.RANDOM; the start time distinguishes it from a later process with the
same id."""
ENDED = ("exited", "created", "dead", "configured", "stopped", "initialized")
"""States of docker and podman in which nothing runs in a container."""


class LaunchedContainer(Struct, frozen=True):
    """A container that primus has started."""

    id: str
    state: str
    labels: dict[str, str]

    @property
    def is_led(self) -> bool:
        """Whether its launcher is alive."""
        pid, _, start = self.labels.get(LAUNCHER, "").partition(".")
        return bool(pid) and read_process_start(pid) == start.partition(".")[0]


def remove_ended_containers(engine: ContainerEngine, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Remove this user's containers on this host that primus has started and that have ended.

    Raises:
        UnfitError: The engine cannot be used.
    """
    check_installed(engine, environ)
    if not engine.is_daemon:
        say(f"{engine.program} keeps no ended containers: nothing to remove")
        return
    for found in list_containers(engine, environ, {}):
        # A live launcher removes its own container, and may still read its exit code.
        if found.state in ENDED and not found.is_led:
            remove_orphaned_container(engine, environ, found, 0, say)


def remove_orphaned_container(
    engine: ContainerEngine,
    environ: Mapping[str, str],
    found: LaunchedContainer,
    grace_s: float,
    say: Callable[[str], None],
) -> None:
    """Stop and remove a container whose launcher has ended."""
    what = "ended container" if found.state in ENDED else "container without a launcher"
    say(f"removing {what} {found.id[:12]} of run {found.labels.get('primus.run', '')}")
    stop_container(engine, environ, found.id, grace_s)


def stop_container(engine: ContainerEngine, environ: Mapping[str, str], identity: str, grace_s: float) -> None:
    """Stop a container, which has `grace_s` to save, and remove it."""
    # The engine enforces the grace period; the limit here only bounds a daemon that does not respond.
    process.run_command([engine.program, "stop", "-t", f"{grace_s:.0f}", identity], environ, grace_s + ENGINE_LIMIT_S)
    process.run_command([engine.program, "rm", "-f", identity], environ, ENGINE_LIMIT_S)


def list_containers(
    engine: ContainerEngine, environ: Mapping[str, str], labels: Mapping[str, str]
) -> list[LaunchedContainer]:
    """Containers with these labels that primus has started for this user on this host.

    Raises:
        UnfitError: The engine cannot be used.
    """
    ours = {"primus.user": str(os.getuid()), "primus.host": get_host_name(), **labels}
    found = []
    for identity in list_container_ids(engine, environ, [f"{name}={value}" for name, value in ours.items()], must=True):
        # One call per container, because `ps` of docker and podman format labels differently.
        form = "{{.State.Status}} {{json .Config.Labels}}"
        answer = process.run_command(
            [engine.program, "container", "inspect", "--format", form, identity], environ, ENGINE_LIMIT_S
        )
        state, _, text = answer.text.strip().partition(" ")
        with contextlib.suppress(msgspec.MsgspecError):  # removed in the meantime
            found.append(LaunchedContainer(identity, state, msgspec.json.decode(text, type=dict[str, str])))
    return [each for each in found if ours.items() <= each.labels.items()]


def list_container_ids(
    engine: ContainerEngine, environ: Mapping[str, str], labels: Sequence[str], *, must: bool = False
) -> list[str]:
    """Ids of the containers with these labels, including ended ones.

    Raises:
        UnfitError: The engine cannot be used; without `must` the list is empty then.
    """
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    answer = process.run_command([engine.program, "ps", "-aq", "--no-trunc", *filters], environ, ENGINE_LIMIT_S)
    if must and answer.state != "ok":
        raise UnfitError(f"{engine.program} cannot be used: {answer.problem}", _explain_unusable_engine(engine))
    return answer.text.split()


def _explain_unusable_engine(engine: ContainerEngine) -> str:
    if engine.kind != "docker":
        return f"try `{engine.program} ps`"
    return "check with `docker ps` that its daemon runs and that you are in the group docker; or use --engine podman"


def check_installed(engine: ContainerEngine, environ: Mapping[str, str]) -> None:
    """Raise UnfitError if `engine` is not on PATH."""
    if shutil.which(engine.program, path=environ.get("PATH")) is None:
        raise UnfitError(
            f"{engine.program} is not installed here (chosen by: {engine.source})",
            "install docker, podman or apptainer, or choose one with --engine",
        )


def read_process_start(pid: str) -> str:
    """Start time of a process in kernel ticks (proc(5), starttime); empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def get_host_name() -> str:
    """Name of this host."""
    return os.uname().nodename
