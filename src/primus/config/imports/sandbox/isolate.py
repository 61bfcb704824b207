"""Run bash where it changes and reaches nothing; a program of its own, which needs only the standard library.

It reads a request (JSON) from standard input and writes what bash did to standard output. The order of its steps:

1. As root, it becomes an ordinary user (nobody), so that limits and permissions apply.
2. It enters new user, mount, process, network, IPC and host-name namespaces (namespaces(7)). There is no network
   device, not even loopback, and no process outside can be seen or signalled.
3. It builds a root folder in memory: bash, a few text tools and their libraries, each mounted read-only, `/dev/null`,
   and the files of the request. It makes that the root and detaches everything else. What a script writes is in that
   memory, whose size is limited, and is gone when the process ends.
4. It starts bash with limits on memory, processor time, open files, file size and number of processes, and kills every
   process of the namespace at the time limit.

Any step that fails ends the program before bash starts, with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import stat
import sys
import time
from typing import TypedDict

NOBODY = 65534
USER = 1000
"""User inside; not root, so that bash has no capability even in its own namespaces."""
FOLDER = "/.primus"
"""Folder inside with what the recorder reads and writes."""
_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC and NEWUTS of <linux/sched.h>."""
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
"""Mount flags of <linux/mount.h>."""
_KEPT_FLAGS = _NOSUID | _NODEV | _NOEXEC | 1024 | 2048 | (1 << 21)
"""Flags of a mount that a user namespace must not clear (mount_namespaces(7)); with NOATIME, NODIRATIME, RELATIME."""
_DETACH = 2
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38
"""Operations of prctl(2)."""
_LIMITS = {
    resource.RLIMIT_CPU: 4,
    resource.RLIMIT_AS: 256 << 20,
    resource.RLIMIT_FSIZE: 4 << 20,
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_CORE: 0,
}
MOST_PROCESSES = 64
_MEMORY = "size=24m,nr_inodes=4096,mode=755"
_MOST_READ = 1 << 20
"""Bytes of the trace, of errors and of records that are read back."""
LINGER_S = 0.5
"""Time for commands that the script started in the background and did not wait for."""

_libc = ctypes.CDLL(None, use_errno=True)


class _SandboxRequest(TypedDict):
    """What `run_script` asks for."""

    binaries: list[str]
    argv: list[str]
    cwd: str
    folders: list[str]
    files: dict[str, str]
    environ: dict[str, str]
    shift: int
    limit_s: float
    processes: int


class _SandboxAnswer(TypedDict, total=False):
    """What bash did, or why it could not be started."""

    unavailable: str
    status: int
    is_late: bool
    records: list[str]
    trace: str
    errors: str


def main() -> None:
    request: _SandboxRequest = json.load(sys.stdin)
    try:
        _become_ordinary()
        _enter_namespaces()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            os._exit(0)  # the answer is the child's
        _set_parent_death()
        _build_root(request["binaries"])
        _write_files(request)
    except OSError as error:
        _answer({"unavailable": f"{error.strerror or error} ({error.filename or 'namespaces'})"})
        return
    _answer(_run_bash(request))


def _answer(result: _SandboxAnswer) -> None:
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _become_ordinary() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self/uid_map belongs to root
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _set_parent_death() -> None:
    _libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


def _enter_namespaces() -> None:
    user, group = os.getuid(), os.getgid()
    _check(_libc.unshare(_NAMESPACES), "unshare")
    for name, text in {"setgroups": "deny", "uid_map": f"{USER} {user} 1", "gid_map": f"{USER} {group} 1"}.items():
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (each.encode() or None for each in (source, target, kind))
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None), target)


def _build_root(binaries: list[str]) -> None:
    """Make a root folder in memory the root of this process; the old one is detached."""
    _mount("none", "/", "", _REC | _PRIVATE)
    base = "/tmp"  # noqa: S108 - only a folder that every system has, and of which nothing is needed
    _mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, _MEMORY)
    for path in [*binaries, "/dev/null"]:
        target = base + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(path, target, "", _BIND)
        kept = os.statvfs(target).f_flag & _KEPT_FLAGS
        _mount("", target, "", _BIND | _REMOUNT | _RDONLY | _NOSUID | kept)
    os.makedirs(f"{base}/proc", exist_ok=True)
    flags = _NOSUID | _NODEV | _NOEXEC | _RDONLY
    with contextlib.suppress(OSError):  # only process substitution needs it; without it, that fails, which is reported
        _mount("proc", f"{base}/proc", "proc", flags, "subset=pid")
        os.symlink("/proc/self/fd", f"{base}/dev/fd")
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{number}", f"{base}/dev/{name}")
    os.mkdir(f"{base}/tmp")  # noqa: S108
    os.chdir(base)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount2")
    os.chdir("/")


def _write_files(request: _SandboxRequest) -> None:
    os.makedirs(f"{FOLDER}/records")
    # A path that is both a folder and a file, or one of the tools, stays what it is.
    for folder in request["folders"]:
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
    for path, text in request["files"].items():
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o755)
                file.write(text)


def _run_bash(request: _SandboxRequest) -> _SandboxAnswer:
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # /proc/1 is closed to what runs beside
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel drops signals to process 1 that it does not handle
    for _ in range(request["shift"]):  # other process numbers in each run: what depends on them differs
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    child = os.fork()
    if not child:
        _start_bash(request)
    status, is_late = _wait(child, time.monotonic() + request["limit_s"])
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # as the first process of the namespace: every other one in it
    return {
        "status": status,
        "is_late": is_late,
        "records": _read_records(),
        "trace": _read_file(f"{FOLDER}/trace"),
        "errors": _read_file(f"{FOLDER}/errors"),
    }


def _start_bash(request: _SandboxRequest) -> None:
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        nothing = os.open("/dev/null", os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(os.open(f"{FOLDER}/errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
        os.closerange(3, 256)
        for kind, most in {**_LIMITS, resource.RLIMIT_NPROC: request["processes"]}.items():
            resource.setrlimit(kind, (most, most))
        os.chdir(request["cwd"])
        os.execve(request["argv"][0], request["argv"], request["environ"])  # noqa: S606 - a shell is the purpose
    finally:
        os._exit(126)


def _wait(child: int, deadline: float) -> tuple[int, bool]:
    """Exit status of bash, and whether it, or what it left in the background, was stopped at the limit."""
    status: int | None = None
    while (left := deadline - time.monotonic()) > 0:
        while True:
            try:
                ended, value = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return (1 if status is None else status), False
            if not ended:
                break
            if ended == child:
                status = os.waitstatus_to_exitcode(value)
                deadline = min(deadline, time.monotonic() + LINGER_S)
        signal.sigtimedwait([signal.SIGCHLD], min(left, 0.1))
    return (1 if status is None else status), status is None


def _read_file(path: str) -> str:
    """Text of a file that the script may have replaced by anything."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        content = os.read(file, _MOST_READ) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    finally:
        os.close(file)
    return content.decode(errors="replace")


def _read_records() -> list[str]:
    """What the recorder wrote, in the order of time."""
    entries = []
    with contextlib.suppress(OSError):
        entries = [each for each in os.scandir(f"{FOLDER}/records") if each.is_file(follow_symlinks=False)]
    records: list[str] = []
    size = 0
    for entry in sorted(entries, key=lambda each: (each.stat(follow_symlinks=False).st_mtime_ns, each.name)):
        records.append(_read_file(entry.path))
        size += len(records[-1])
        if size > _MOST_READ:
            break
    return records


if __name__ == "__main__":
    main()
