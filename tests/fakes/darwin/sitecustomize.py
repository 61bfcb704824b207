"""A Python that says it runs on macOS and lacks what only Linux has: system calls, constants, /proc, /sys and /dev/shm.

The interpreter and its compiled modules stay Linux's, so what they need by the system's name is loaded before.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import sysconfig

import psutil  # noqa: F401  # its compiled part is Linux's

sysconfig.get_config_vars()

LINUX_ONLY = {
    os: (
        *("O_DIRECT", "O_TMPFILE", "copy_file_range", "eventfd", "getrandom", "getres", "getxattr", "listxattr"),
        *("memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "removexattr", "sched_", "setns"),
        *("setres", "setxattr", "splice", "unshare"),
    ),
    signal: ("SIGPOLL", "SIGPWR", "SIGRT", "SIGSTKFLT", "pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
    select: ("EPOLL", "epoll"),
    resource: ("RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_OFILE", "RLIMIT_RT", "RLIMIT_SIGPENDING", "prlimit"),
}
for module, prefixes in LINUX_ONLY.items():
    for name in [name for name in dir(module) if name.startswith(prefixes)]:
        delattr(module, name)
sys.platform = "darwin"


def is_absent(path: object) -> bool:
    """Whether macOS has no such file; psutil, which asks its kernel otherwise, still finds Linux's."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    is_linux = str(text).startswith(("/proc", "/sys/", "/dev/shm"))
    return is_linux and "psutil" not in sys._getframe(2).f_code.co_filename


def hook(event: str, args: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and is_absent(args[0]):
        raise FileNotFoundError(2, "No such file or directory", args[0])


def stat(path, *args, _stat=os.stat, **kwargs):
    if is_absent(path):
        raise FileNotFoundError(2, "No such file or directory", path)
    return _stat(path, *args, **kwargs)


os.stat = stat
sys.addaudithook(hook)
