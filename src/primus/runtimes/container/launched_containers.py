"""Containers that primus has started on this host: found by their labels, and removed when they are over."""

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

ASKING_S = 30.0
"""Time that an engine has to answer; a busy daemon takes seconds."""
LAUNCHER = "primus.launcher"
"""Label that says which process a container belongs to."""
ENDED = ("exited", "created", "dead", "configured", "stopped", "initialized")
"""States of containers in which nothing runs, as docker and podman call them."""


class LaunchedContainer(Struct, frozen=True):
    """A container that primus has started."""

    id: str
    state: str
    labels: dict[str, str]

    @property
    def is_led(self) -> bool:
        """Whether its launcher is alive."""
        pid, _, begun = self.labels.get(LAUNCHER, "").partition(".")
        return bool(pid) and read_process_start(pid) == begun.partition(".")[0]


def remove_ended_containers(engine: ContainerEngine, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Remove this user's containers on this host that primus has started and that have ended.

    Raises:
        UnfitError: The engine cannot be used.
    """
    check_installed(engine, environ)
    if not engine.is_daemon:
        say(f"{engine.program} leaves nothing to remove")
        return
    for found in list_containers(engine, environ, {}):
        if found.state in ENDED and not found.is_led:
            remove_orphaned_container(engine, environ, found, 0, say)


def remove_orphaned_container(
    engine: ContainerEngine,
    environ: Mapping[str, str],
    found: LaunchedContainer,
    grace_s: float,
    say: Callable[[str], None],
) -> None:
    """End a container whose launcher is gone, and remove it."""
    what = "ended container" if found.state in ENDED else "container without a launcher"
    say(f"removing {what} {found.id[:12]} of run {found.labels.get('primus.run', '')}")
    stop_container(engine, environ, found.id, grace_s)


def stop_container(engine: ContainerEngine, environ: Mapping[str, str], identity: str, grace_s: float) -> None:
    """End a container, which has `grace_s` to save, and remove it."""
    process.run_command([engine.program, "stop", "-t", f"{grace_s:.0f}", identity], environ, grace_s + ASKING_S)
    process.run_command([engine.program, "rm", "-f", identity], environ, ASKING_S)


def list_containers(
    engine: ContainerEngine, environ: Mapping[str, str], labels: Mapping[str, str]
) -> list[LaunchedContainer]:
    """What primus has started for this user on this host, with these labels.

    Raises:
        UnfitError: The engine cannot be used.
    """
    ours = {"primus.user": str(os.getuid()), "primus.host": get_host_name(), **labels}
    found = []
    for identity in list_container_ids(engine, environ, [f"{name}={value}" for name, value in ours.items()], must=True):
        form = "{{.State.Status}} {{json .Config.Labels}}"
        answer = process.run_command(
            [engine.program, "container", "inspect", "--format", form, identity], environ, ASKING_S
        )
        state, _, text = answer.text.strip().partition(" ")
        with contextlib.suppress(msgspec.MsgspecError):  # it is gone meanwhile
            found.append(LaunchedContainer(identity, state, msgspec.json.decode(text, type=dict[str, str])))
    return [each for each in found if ours.items() <= each.labels.items()]


def list_container_ids(
    engine: ContainerEngine, environ: Mapping[str, str], labels: Sequence[str], *, must: bool = False
) -> list[str]:
    """Ids of the containers with these labels, also of those that have ended.

    Raises:
        UnfitError: The engine cannot be used, and `must` be.
    """
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    answer = process.run_command([engine.program, "ps", "-aq", "--no-trunc", *filters], environ, ASKING_S)
    if must and answer.state != "ok":
        raise UnfitError(f"{engine.program} cannot be used: {answer.problem}", _explain_unusable_engine(engine))
    return answer.text.split()


def _explain_unusable_engine(engine: ContainerEngine) -> str:
    if engine.kind != "docker":
        return f"try `{engine.program} ps`"
    other = "--engine chooses another one, such as podman or apptainer"
    return f"is its daemon running, and are you in the group docker? Try `docker ps`; {other}"


def check_installed(engine: ContainerEngine, environ: Mapping[str, str]) -> None:
    """Raise UnfitError if `engine` is not on PATH."""
    if shutil.which(engine.program, path=environ.get("PATH")) is None:
        raise UnfitError(
            f"{engine.program} is not installed here (chosen by: {engine.source})",
            "install docker, podman or apptainer, or name one with --engine",
        )


def read_process_start(pid: str) -> str:
    """When a process began, in the kernel's ticks: with its number it names one process for good."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def get_host_name() -> str:
    """Name of this host."""
    return os.uname().nodename
