"""Two real users of this machine, who share a folder: their commands run as processes of their own."""

from __future__ import annotations

import functools
import grp
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import Struct

from fakes import cli

GROUP = "games"
"""A group of Debian that both users are in here."""
MAIN = "import sys; from primus.cli.main import main; sys.exit(main())"


class UnixUser(Struct, frozen=True, kw_only=True):
    """A user with a home folder, in the shared group."""

    name: str
    home: Path
    umask: int = 0o022
    limit_s: float = 120
    """For a command."""

    def run(
        self, *words: str, cwd: Path, code: int = 0, umask: int | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """The command as this user."""
        base = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), "USER": self.name}
        base |= {"PYTHONPATH": os.pathsep.join(find_import_path()), "PRIMUS_PLUGINS": str(cli.PLUGINS)}
        base |= {"PRIMUS_LAUNCHER_FILE": "", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [find_shared_python(), "-c", MAIN, *words],
            cwd=cwd,
            env=base | env,
            user=self.name,
            group=GROUP,
            extra_groups=[GROUP],
            umask=self.umask if umask is None else umask,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=self.limit_s,
            check=False,
        )
        assert done.returncode == code, f"{self.name}: {done.stdout}{done.stderr}"
        return done


@functools.cache
def find_shared_python() -> str:
    """An interpreter of the running version that other users may start: that of a private home folder cannot be."""
    for python in (sys.executable, "/usr/bin/python3"):
        if _is_usable(python):
            return python
    pytest.skip("no Python of this version that other users may start")


def _is_usable(python: str) -> bool:
    ask = [python, "-c", "import sys, msgspec; print(sys.version_info[:2])"]
    environ = {"PYTHONPATH": os.pathsep.join(find_import_path()), "PATH": "/usr/bin:/bin"}
    try:
        done = subprocess.run(ask, user="nobody", group=GROUP, env=environ, capture_output=True, text=True, check=False)
    except (OSError, LookupError):
        return False
    return done.returncode == 0 and done.stdout.strip() == str(sys.version_info[:2])


def find_import_path() -> list[str]:
    """The checkout, and the packages of this interpreter."""
    return [str(cli.SOURCE), *(each for each in sys.path if each.endswith(("site-packages", "dist-packages")))]


def make_users(folder: Path) -> tuple[UnixUser, UnixUser]:
    """Two users with home folders in `folder`; skips where this is not root on such a system."""
    if os.getuid() != 0:
        pytest.skip("only root can be two users")
    try:
        grp.getgrnam(GROUP)
        accounts = [pwd.getpwnam(name) for name in ("nobody", "daemon")]
    except KeyError as error:
        pytest.skip(str(error))
    find_shared_python()
    users = []
    for account in accounts:
        home = folder / f"home-{account.pw_name}"
        home.mkdir(mode=0o700)
        os.chown(home, account.pw_uid, grp.getgrnam(GROUP).gr_gid)
        users.append(UnixUser(name=account.pw_name, home=home))
    return users[0], users[1]


@contextmanager
def make_public_place() -> Iterator[Path]:
    """A folder that all users may enter while open; pytest's own are private, and each session makes them so again."""
    folder = Path(tempfile.mkdtemp(prefix="primus-users-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def make_shared_folder(path: Path) -> Path:
    """A folder of the group, as sites make it: setgid, so that what is below belongs to the group."""
    path.mkdir()
    os.chown(path, 0, grp.getgrnam(GROUP).gr_gid)
    path.chmod(0o2775)
    return path
