"""`container` with a real podman of a user who is not root, and whose image has a Python of its own."""

from __future__ import annotations

import grp
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import containers
from cluster.containers import INSIDE_PATH, Podman
from cluster.seeing import EXPERIMENT
from fakes import unix_users
from fakes.unix_users import UnixUser, make_public_place, make_users

pytestmark = [pytest.mark.cluster("podman"), pytest.mark.slow]


class RootlessPodman(Podman):
    """podman of a user without subordinate ids: the container's root is that user."""

    def __init__(self, folder: Path, user: UnixUser) -> None:
        self.user = user
        self.python = unix_users.find_shared_python()
        self.inside_path = INSIDE_PATH if self.python == sys.executable else "/usr/bin:/bin"
        super().__init__(folder)
        self.environ["XDG_RUNTIME_DIR"] = str(user.home)

    def __call__(self, *words: str, check: bool = True) -> str:
        environ = {**self.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self.user.home)}
        environ["XDG_RUNTIME_DIR"] = str(self.user.home)
        done = subprocess.run(
            ["podman", *words],
            cwd=self.user.home,
            env=environ,
            user=self.user.name,
            group=unix_users.GROUP,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def mounts(self) -> list[str]:
        """Options by which a container sees the interpreter, and the packages of this one."""
        if self.python == sys.executable:
            return containers.mounts()
        packages = next(each for each in unix_users.find_import_path() if each.endswith("site-packages"))
        inside = "/usr/local/lib/python{}.{}/dist-packages".format(*sys.version_info)
        places = {"/usr/lib": "/usr/lib", os.path.realpath(self.python): "/usr/bin/python3", packages: inside}
        return [word for place, there in places.items() for word in ("--mount", f"{place}:{there}:ro")]

    def end(self) -> None:
        super().end()
        self("system", "migrate", check=False)  # ends the process that keeps the user's namespace


@pytest.fixture
def engine() -> Iterator[RootlessPodman]:
    with make_public_place() as folder:
        user, _ = make_users(folder)
        made = RootlessPodman(folder / "podman", user)
        yield made
        made.end()


@pytest.mark.native
def test_a_user_who_is_not_root_trains_and_owns_the_run(engine: RootlessPodman, tmp_path: Path) -> None:
    home = engine.user.home
    (home / "e.yaml").write_text(EXPERIMENT)
    # podman binds the host's message queues with --ipc host, and some machines have none.
    ipc = () if Path("/dev/mqueue").exists() else ("--ipc", "private")
    line = ["container", "--engine", "podman", "--image", engine.image, *engine.mounts(), *ipc]
    line += ["--env", "PRIMUS_PYTHON=/none", "--", "train", "pretrain", "--config", "e.yaml"]
    engine.user.run(*line, cwd=home, **engine.environ)
    folder = next(home.glob("output/e/2*/metadata.json")).parent
    assert json.loads((folder / "metadata.json").read_text())["outcome"]["state"] == "done"
    assert '"step":5' in (folder / "events.jsonl").read_text()
    owner = (pwd.getpwnam(engine.user.name).pw_uid, grp.getgrnam(unix_users.GROUP).gr_gid)
    assert {(path.stat().st_uid, path.stat().st_gid) for path in (folder, *folder.rglob("*"))} == {owner}
    assert json.loads((folder / "container.json").read_text())["engine"] == "podman"
    assert engine("ps", "-aq") == "", "it is removed"
