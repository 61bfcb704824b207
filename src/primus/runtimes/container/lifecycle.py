"""Run a container, stop it with its launcher, and leave all other containers alone.

Docker and podman run containers in a daemon or under conmon, so a container can outlive the client and this launcher.
How it ends:

    the task exits              the client exits with the task's code; --rm removes the container
    a signal to this launcher   the client passes it on, the task saves; after --grace the container is killed
    the client dies             the container with this launcher's label is stopped and removed
    this launcher is killed     the watchdog process stops it (watchdog.py)
    everything is killed        the next start of the same run stops it (`_prepare_container`)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from primus import process
from primus.errors import PrimusError, UsageError
from primus.launch import foreground
from primus.runs.store import Run, RunOutcome
from primus.runtimes.container import image_record, launched_containers, mounts, watchdog
from primus.runtimes.container.engines import ContainerEngine, ContainerSpec

MARK = "PRIMUS_LAUNCHER"
"""Variable that marks the processes of a launcher, as the label `launched_containers.LAUNCHER` marks its containers."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ContainerLaunch(Struct, frozen=True, kw_only=True):
    """Input of `run_container`."""

    container: ContainerSpec
    environ: Mapping[str, str]
    """Variables of the engine's client."""
    grace_s: float
    run: Run | None
    say: Callable[[str], None]
    doubt: str = ""
    """Hint that is printed if the engine does not start the container."""


def run_container(launch: ContainerLaunch, argv: Sequence[str], *, removes_ended: bool = False) -> int:
    """Run the container until it ends; gives the exit code of the task inside.

    Args:
        launch: The container and its surroundings.
        argv: The planned command line.
        removes_ended: Whether ended containers of other runs of this user are removed first.

    Raises:
        PrimusError: The container cannot be started.
    """
    try:
        _prepare_container(launch, removes_ended)
        return _run_engine(launch, argv)
    except PrimusError as error:
        if launch.run and launch.container.rank == 0:
            # The launcher inside did not start, so nobody else records the failure. Node 0 does, as for any run.
            outcome = RunOutcome(state="failed", exit_code=error.exit_code, reason=error.problem)
            launch.run.update_metadata(ended=time.time(), outcome=outcome)
        raise


def _prepare_container(launch: ContainerLaunch, removes_ended: bool) -> None:
    """Check that the container can be started, and remove containers of this run without a launcher."""
    container = launch.container
    absent = mounts.find_missing_sources(container.mounts)
    if absent:
        raise UsageError(
            f"mount source {absent[0]} does not exist on {launched_containers.get_host_name()}",
            "create it, or remove the mount",
        )
    launched_containers.check_installed(container.engine, launch.environ)
    if not container.engine.is_daemon:
        return
    if removes_ended:
        launched_containers.remove_ended_containers(container.engine, launch.environ, launch.say)
    for found in launched_containers.list_containers(
        container.engine, launch.environ, {"primus.run": container.labels["primus.run"]}
    ):
        is_same = found.labels.get("primus.node") == container.labels["primus.node"]
        # A live launcher owns this container: two containers of one run and node would write the same files.
        if found.is_led and is_same and found.state not in launched_containers.ENDED:
            pid = found.labels[launched_containers.LAUNCHER].partition(".")[0]
            raise PrimusError(
                f"this run is already running in container {found.id[:12]}, started by process {pid}",
                "wait until it ends, or stop that process",
            )
        # Its launcher and its watchdog were killed, for example with all processes of their session.
        if not found.is_led:
            launched_containers.remove_orphaned_container(
                container.engine, launch.environ, found, launch.grace_s, launch.say
            )


def _run_engine(launch: ContainerLaunch, argv: Sequence[str]) -> int:
    engine = launch.container.engine
    # Process id and start time let other commands test whether this launcher is alive; the random part separates two
    # containers of one launcher.
    token = f"{os.getpid()}.{launched_containers.read_process_start(str(os.getpid()))}.{secrets.token_hex(4)}"
    label = f"{launched_containers.LAUNCHER}={token}" if engine.is_daemon else ""
    words = [
        # Labels follow `docker run`, before the planned options. They are not part of the plan, because they change
        # with each start.
        *argv[:2],
        *(["--label", label, "--label", f"primus.host={launched_containers.get_host_name()}"] if label else []),
        *argv[2:],
    ]
    environ, began = {**launch.environ, MARK: token}, time.time()
    _raise_limits(engine)
    # The order matters: the watchdog runs before the engine does, so that no container is without one, and leaves last.
    with (
        _stop_container_if_killed(launch, label, token),
        image_record.record_image(launch.run, launch.container, launch.environ),
        _kill_container_after_grace(launch, label),
    ):
        try:
            code = foreground.run_in_foreground(words, environ, has_terminal=launch.container.has_terminal)
        except BaseException:
            _stop_leftover_container(launch, label)
            raise
        # With code 0 the task itself has ended and --rm has removed its container; other codes may be the client's.
        if code and label:
            _stop_leftover_container(launch, label)
    if not _has_launcher_started(launch, began):
        _explain_exit_code(launch, code)
    _report_foreign_files(launch, began)
    return code


@contextlib.contextmanager
def _stop_container_if_killed(launch: ContainerLaunch, label: str, token: str) -> Iterator[None]:
    """Run a watchdog while open: a process in a separate session that stops the container if this process is killed."""
    # -I: the watchdog must start whatever is in the working folder or PYTHONPATH.
    command = [sys.executable, "-I", watchdog.__file__, launch.container.engine.program, label]
    child = subprocess.Popen(
        [*command, f"{launch.grace_s:.0f}", f"{MARK}={token}"],
        env=dict(launch.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_ignore_stop_signals,
    )
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself
            # The line tells the watchdog that the container has ended in order.
            child.communicate(b"done\n", timeout=launched_containers.ENGINE_LIMIT_S)


def _ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _kill_container_after_grace(launch: ContainerLaunch, label: str) -> Iterator[None]:
    """While open, kill the container if it runs longer than the grace period after a stop signal.

    The engine's client passes the signal on. It is not sent again here: the task takes a second signal as an order to
    exit without a checkpoint. The wakeup file descriptor reports signals to a thread, because the main thread waits for
    the client and its handlers belong to `foreground`.
    """
    # Only the main thread may set a wakeup descriptor.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # CPython's C handler writes the number of each handled signal to the pipe, even while the main thread is in a
    # system call.
    read, write = os.pipe()
    # Required by set_wakeup_fd; a full pipe loses a signal that is there many times already.
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_wait_for_deadline, args=(launch, label, read), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)  # first, so that no signal writes to a closed pipe
        os.write(write, b"\0")
        watcher.join()
        os.close(read)
        os.close(write)


def _wait_for_deadline(launch: ContainerLaunch, label: str, read: int) -> None:
    deadline = None  # set by the first stop signal; a second one does not extend it
    while True:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([read], [], [], left_s)[0]:
            launch.say(f"still running {launch.grace_s:g} s after the stop signal: killing the container")
            _kill_container(launch, label)
            return
        received = os.read(read, 64)
        if 0 in received:  # written by the main thread: the container has ended (signal numbers start at 1)
            return
        if deadline is None and set(received) & {int(number) for number in STOP_SIGNALS}:
            deadline = time.monotonic() + launch.grace_s


def _kill_container(launch: ContainerLaunch, label: str) -> None:
    """Kill the container or the processes that this launcher has started."""
    engine = launch.container.engine
    if label:
        for identity in launched_containers.list_container_ids(engine, launch.environ, [label]):
            process.run_command([engine.program, "kill", identity], launch.environ, launched_containers.ENGINE_LIMIT_S)
        return
    # apptainer has no daemon: the processes of the container are children of this one, and carry MARK.
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.environ().get(MARK):
                child.kill()


def _stop_leftover_container(launch: ContainerLaunch, label: str) -> None:
    """Stop and remove the container of this launcher, if its client has ended before it."""
    engine = launch.container.engine
    if not label:
        return
    for identity in launched_containers.list_container_ids(engine, launch.environ, [label]):
        launched_containers.stop_container(engine, launch.environ, identity, launch.grace_s)


def _has_launcher_started(launch: ContainerLaunch, began: float) -> bool:
    """Whether a launcher has written its log since `began`: then exit codes are its own, or those of its death."""
    logs = (launch.run.directory / "logs").glob("launch*.log") if launch.run else ()
    return any(log.stat().st_mtime >= began for log in logs)


def _report_foreign_files(launch: ContainerLaunch, began: float) -> None:
    """Say that the container left files of another user, such as docker's root, and how to get them back."""
    folder = launch.run.directory if launch.run else Path.cwd()
    try:
        stats = [entry.stat(follow_symlinks=False) for entry in os.scandir(folder)]
    except OSError:
        return
    if os.geteuid() == 0 or not any(each.st_uid != os.getuid() and each.st_ctime >= began for each in stats):
        return
    engine, image = launch.container.engine.program, launch.container.image
    mine = f"{os.getuid()}:{os.getgid()}"
    back = shlex.join([engine, "run", "--rm", "--entrypoint", "chown", "-v", f"{folder}:{folder}", image, "-R", mine])
    print(
        f"primus-cli: warning: {folder} holds files of the image's user: add --user to own what a container writes;"
        f" to own these: {back} {shlex.quote(str(folder))}",
        file=sys.stderr,
        flush=True,
    )


def _explain_exit_code(launch: ContainerLaunch, code: int) -> None:
    """Print what an exit code of the engine itself means (docker run, Exit status; apptainer uses 255)."""
    engine, image = launch.container.engine, launch.container.image
    meanings = {
        126: "the command cannot be executed, or the engine could not start it (see its message above)",
        127: "the command was not found: primus needs `sh` and Python in the image",
    }
    meanings[125 if engine.is_daemon else 255] = (
        f"{engine.program} could not start the container (see its message above)"
    )
    if code == 125 and engine.is_daemon:
        answer = process.run_command(
            [engine.program, "image", "inspect", image], launch.environ, launched_containers.ENGINE_LIMIT_S
        )
        if answer.state != "ok":
            meanings[125] = f"image {image} could not be pulled: try `{engine.program} pull {image}`"
    if code in meanings:
        doubt = f"\n  {launch.doubt}" if launch.doubt and code in (125, 255) else ""
        print(f"primus-cli: exit code {code} usually means: {meanings[code]}{doubt}", file=sys.stderr, flush=True)


def _raise_limits(engine: ContainerEngine) -> None:
    """Raise the limits that apptainer's processes inherit to the hard limits: RDMA locks memory, loaders open files."""
    if engine.is_daemon:
        return
    import resource

    for number in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE):
        hard = resource.getrlimit(number)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(number, (hard, hard))
