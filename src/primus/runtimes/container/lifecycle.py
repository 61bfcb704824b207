"""A container from its start to its end: it is started here, ends with its launcher, and no other one is touched."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from primus import process
from primus.errors import PrimusError, UsageError
from primus.launch import foreground
from primus.runs.store import Run, RunOutcome
from primus.runtimes.container import image_record, launched_containers, mounts
from primus.runtimes.container.engines import ContainerEngine, ContainerSpec

MARK = "PRIMUS_LAUNCHER"
"""Variable that says which launcher a process belongs to, as the label `started.LAUNCHER` does of a container."""
ASK_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WATCHDOG_SCRIPT = """\
trap '' HUP INT TERM
read -r word && exit
engine=$1 label=$2 grace=$3 mark=$4
marked() { grep -lzxFs -- "$mark" /proc/[0-9]*/environ | sed 's,^/proc/,,; s,/environ$,,'; }
stop() {
    for id in $("$engine" ps -aq --filter "label=$label"); do
        "$engine" stop -t "$grace" "$id"
        "$engine" rm -f "$id"
    done
}
[ -z "$label" ] || stop
set -- $(marked | sort -n)
[ $# = 0 ] || kill -TERM "$1"
while [ "$grace" -gt 0 ] && [ -n "$(marked)" ]; do sleep 1; grace=$((grace - 1)); done
set -- $(marked)
[ $# = 0 ] || kill -KILL "$@"
[ -z "$label" ] || { grace=0; stop; }
"""
"""Waits for the launcher: a word says that all is well. If it ends without one, the container is stopped; then the
engine's client is asked to end, which may still be fetching the image, and in the end what has its mark is killed."""


class ContainerLaunch(Struct, frozen=True, kw_only=True):
    """What a container is started with."""

    container: ContainerSpec
    environ: Mapping[str, str]
    """Variables of the engine's client."""
    grace_s: float
    run: Run | None
    say: Callable[[str], None]
    doubt: str = ""
    """What may be wrong if the engine does not start it."""


def run_container(scene: ContainerLaunch, argv: Sequence[str], *, removes_ended: bool = False) -> int:
    """Run the container to its end; gives the exit code of what ran inside.

    Args:
        scene: What it is started with.
        argv: The planned command line.
        removes_ended: Whether ended containers of other runs of this user are removed first.

    Raises:
        PrimusError: It cannot be started.
    """
    try:
        _prepare_container(scene, removes_ended)
        return _run_engine(scene, argv)
    except PrimusError as error:
        if scene.run and scene.container.rank == 0:
            outcome = RunOutcome(state="failed", exit_code=error.exit_code, reason=error.problem)
            scene.run.update_metadata(ended=time.time(), outcome=outcome)
        raise


def _prepare_container(scene: ContainerLaunch, removes_ended: bool) -> None:
    """See that the container can be started, and that nothing of this run is left of an earlier launcher."""
    container = scene.container
    absent = mounts.find_missing_sources(container.mounts)
    if absent:
        raise UsageError(f"mount source {absent[0]} does not exist", "on this machine, where the container starts")
    launched_containers.check_installed(container.engine, scene.environ)
    if not container.engine.is_daemon:
        return
    if removes_ended:
        launched_containers.remove_ended_containers(container.engine, scene.environ, scene.say)
    for found in launched_containers.list_containers(
        container.engine, scene.environ, {"primus.run": container.labels["primus.run"]}
    ):
        is_same = found.labels.get("primus.node") == container.labels["primus.node"]
        if found.is_led and is_same and found.state not in launched_containers.ENDED:
            pid = found.labels[launched_containers.LAUNCHER].partition(".")[0]
            raise PrimusError(
                f"this run is being done in container {found.id[:12]} by process {pid}", "wait for its end"
            )
        if not found.is_led:
            launched_containers.remove_orphaned_container(
                container.engine, scene.environ, found, scene.grace_s, scene.say
            )


def _run_engine(scene: ContainerLaunch, argv: Sequence[str]) -> int:
    engine = scene.container.engine
    token = f"{os.getpid()}.{launched_containers.read_process_start(str(os.getpid()))}.{secrets.token_hex(4)}"
    label = f"{launched_containers.LAUNCHER}={token}" if engine.is_daemon else ""
    words = [
        *argv[:2],
        *(["--label", label, "--label", f"primus.host={launched_containers.get_host_name()}"] if label else []),
        *argv[2:],
    ]
    environ = {**scene.environ, MARK: token}
    _raise_limits(engine)
    with (
        _stop_container_if_killed(scene, label, token),
        image_record.record_image(scene.run, scene.container, scene.environ),
        _kill_container_after_grace(scene, label),
    ):
        try:
            code = foreground.run_in_foreground(words, environ, has_terminal=scene.container.has_terminal)
        except BaseException:
            _stop_leftover_container(scene, label)
            raise
        if code and label:
            _stop_leftover_container(scene, label)
    _explain_exit_code(scene, code)
    return code


@contextlib.contextmanager
def _stop_container_if_killed(scene: ContainerLaunch, label: str, token: str) -> Iterator[None]:
    """While open, a process of its own session stops the container should this one be killed."""
    words = (scene.container.engine.program, label, f"{scene.grace_s:.0f}", f"{MARK}={token}")
    guard = subprocess.Popen(
        ["/bin/sh", "-c", WATCHDOG_SCRIPT, "primus-guard", *words],
        env=dict(scene.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(b"done\n")
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself
            guard.wait(timeout=launched_containers.ASKING_S)


@contextlib.contextmanager
def _kill_container_after_grace(scene: ContainerLaunch, label: str) -> Iterator[None]:
    """While open, the container is killed when its time is over after it was asked to end.

    It is asked by the signal itself, which the engine's client passes on, and not a second time: what runs inside takes
    a second one for impatience, and gives up its last checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_wait_for_deadline, args=(scene, label, read), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(write, b"\0")
        watcher.join()
        os.close(read)
        os.close(write)


def _wait_for_deadline(scene: ContainerLaunch, label: str, read: int) -> None:
    deadline = None
    while True:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([read], [], [], left_s)[0]:
            scene.say(f"not ended {scene.grace_s:g} s after it was asked to: killing the container")
            _kill_container(scene, label)
            return
        heard = os.read(read, 64)
        if 0 in heard:
            return
        if deadline is None and set(heard) & {int(number) for number in ASK_TO_END}:
            deadline = time.monotonic() + scene.grace_s


def _kill_container(scene: ContainerLaunch, label: str) -> None:
    """End what this launcher has started, at once."""
    engine = scene.container.engine
    if label:
        for identity in launched_containers.list_container_ids(engine, scene.environ, [label]):
            process.run_command([engine.program, "kill", identity], scene.environ, launched_containers.ASKING_S)
        return
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.environ().get(MARK):
                child.kill()


def _stop_leftover_container(scene: ContainerLaunch, label: str) -> None:
    """End and remove the container of this launcher, if its client went away before it."""
    engine = scene.container.engine
    if not label:
        return
    for identity in launched_containers.list_container_ids(engine, scene.environ, [label]):
        launched_containers.stop_container(engine, scene.environ, identity, scene.grace_s)


def _explain_exit_code(scene: ContainerLaunch, code: int) -> None:
    """Say what an engine's own exit codes mean."""
    engine, image = scene.container.engine, scene.container.image
    meanings = {
        126: "the command is there but cannot be executed, or the engine could not start it and said why above",
        127: "the command was not found: primus needs `sh` and Python in the image",
    }
    meanings[125 if engine.is_daemon else 255] = f"{engine.program} could not start the container; it said why above"
    if code == 125 and engine.is_daemon:
        answer = process.run_command(
            [engine.program, "image", "inspect", image], scene.environ, launched_containers.ASKING_S
        )
        if answer.state != "ok":
            meanings[125] = f"image {image} is not here and could not be fetched: try `{engine.program} pull {image}`"
    if code in meanings:
        doubt = f"\n  {scene.doubt}" if scene.doubt and code in (125, 255) else ""
        print(f"primus-cli: exit code {code}, which mostly means: {meanings[code]}{doubt}", file=sys.stderr, flush=True)


def _raise_limits(engine: ContainerEngine) -> None:
    """Raise what apptainer's processes inherit to what is allowed: RDMA locks memory, data loaders open files."""
    if engine.is_daemon:
        return
    import resource

    for number in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE):
        hard = resource.getrlimit(number)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(number, (hard, hard))
