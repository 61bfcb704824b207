"""The environment of an engine is made by real pip and uv from a folder of small wheels, or nothing is left of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fakes import cli
from fakes.engine_wheels import make_engine_wheels, make_wheel, offline_variables, write_engine_plug_ins
from primus.site_folders import list_import_folders, list_package_versions

pytestmark = pytest.mark.slow  # each test starts pip


class EngineShop:
    """A folder of wheels, the plug-ins that name the engine, and the folder of environments."""

    def __init__(self, folder: Path) -> None:
        self.wheels, self.plug_ins, self.engines = folder / "wheels", folder / "plug-ins", folder / "engines"
        self.prefix = self.engines / "small"
        self.env = offline_variables(self.wheels, self.plug_ins, self.engines) | {"PRIMUS_INSTALLER": "pip"}
        make_engine_wheels(self.wheels, "1.2")
        write_engine_plug_ins(self.plug_ins)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return cli.run(*words, cwd=self.plug_ins, timeout_s=120, **self.env, **env)

    def popen(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "primus", *words]
        env = {**cli.environment(), **self.env}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def installed(self) -> dict[str, str]:
        """The packages that the environment adds."""
        site = next(self.prefix.glob("lib/python3*/site-packages"))
        return list_package_versions([str(site)])

    def leftovers(self) -> set[str]:
        return {path.name for path in self.engines.iterdir()} - {"small", "small.log", ".small.lock"}


@pytest.fixture
def shop(tmp_path: Path) -> EngineShop:
    return EngineShop(tmp_path)


def use_uv(shop: EngineShop) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    del shop.env["PRIMUS_INSTALLER"]
    shop.env["PATH"] = f"{Path(uv).parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("with_uv", [False, True], ids=["pip", "uv"])
def test_setup_installs_the_pinned_packages_and_shares_the_others(shop: EngineShop, with_uv: bool) -> None:
    if with_uv:
        use_uv(shop)
    done = shop.run("setup", "--engine", "small")
    assert done.returncode == 0, done.stderr
    assert shop.installed() == {"small-base": "2.0", "small-core": "1.2"}, "the pin of small-base, not the newest one"
    assert f"installing small-core==1.2 and what they require with {'uv' if with_uv else 'pip'}" in done.stderr
    python = done.stdout.split()[0]
    assert python == str(shop.prefix / "bin/python")
    code = "import small.core, msgspec, primus; print(small.core.__version__)"
    assert subprocess.run([python, "-c", code], capture_output=True, text=True).stdout == "1.2\n"
    assert shop.leftovers() == set()


def test_a_second_setup_installs_nothing_and_changed_pins_update_the_environment(shop: EngineShop) -> None:
    assert shop.run("setup", "--engine", "small").returncode == 0
    before = shop.prefix.stat().st_ino
    again = shop.run("setup", "--engine", "small")
    assert again.returncode == 0 and again.stderr == "" and shop.prefix.stat().st_ino == before
    make_engine_wheels(shop.wheels, "1.3")
    write_engine_plug_ins(shop.plug_ins, "1.3")
    listed = json.loads(shop.run("engines", "--json").stdout)
    (small,) = [each for each in listed if each["engine"] == "small"]
    assert small["version"] == "1.2" and "its pins have changed" in small["remedy"]
    updated = shop.run("setup", "--engine", "small")
    assert "updating" in updated.stderr and shop.installed()["small-core"] == "1.3"
    assert shop.leftovers() == set()


@pytest.mark.parametrize("with_uv", [False, True], ids=["pip", "uv"])
def test_a_package_of_the_user_is_added_to_the_environment_and_changes_nothing_in_it(
    shop: EngineShop, with_uv: bool
) -> None:
    if with_uv:
        use_uv(shop)
    make_wheel(shop.wheels, "tracker", "3.1", {"tracker.py": ""}, ("small-base",))
    done = shop.run("setup", "--engine", "small", "--with", "tracker")
    assert done.returncode == 0, done.stderr
    assert f"installing tracker into {shop.prefix}" in done.stderr
    assert shop.installed() == {"small-base": "2.0", "small-core": "1.2", "tracker": "3.1"}
    make_wheel(shop.wheels, "greedy", "1.0", {"greedy.py": ""}, ("small-base>2.0",))
    refused = shop.run("setup", "--engine", "small", "--with", "greedy")
    assert refused.returncode == 3 and "greedy cannot be installed" in refused.stderr
    assert shop.installed()["small-base"] == "2.0"


def test_a_dry_run_prints_what_would_be_installed_and_touches_nothing(shop: EngineShop) -> None:
    done = shop.run("--dry-run", "setup", "--engine", "small")
    assert done.returncode == 0, done.stderr
    assert f"makes the environment {shop.prefix}" in done.stdout and "small-core==1.2" in done.stdout
    assert not shop.engines.exists()


def test_a_shared_package_in_another_version_is_shadowed_and_not_changed(
    shop: EngineShop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """msgspec is shared; the engine pins another version of it."""
    make_wheel(shop.wheels, "msgspec", "0.0.1", {"msgspec/__init__.py": "__version__ = '0.0.1'\n"})
    (shop.plug_ins / "engines/small.yaml").write_text(
        (shop.plug_ins / "engines/small.yaml")
        .read_text()
        .replace("[small-core==1.2]", "[small-core==1.2, msgspec==0.0.1]")
    )
    assert shop.run("setup", "--engine", "small").returncode == 0
    versions = list_package_versions(list_import_folders(shop.prefix))
    assert versions["msgspec"] == "0.0.1"
    assert subprocess.run([sys.executable, "-c", "import msgspec; msgspec.json"], check=True)


@pytest.mark.parametrize("with_uv", [False, True], ids=["pip", "uv"])
def test_offline_without_wheels_it_fails_with_the_reason_and_the_log(shop: EngineShop, with_uv: bool) -> None:
    if with_uv:
        use_uv(shop)
    shutil.rmtree(shop.wheels)
    shop.wheels.mkdir()
    done = shop.run("setup", "--engine", "small")
    assert done.returncode == 3
    (reason,) = re.findall("Small cannot be installed: (.*)", done.stderr)
    assert "small-core" in reason and re.search("not find|not found", reason)
    assert str(shop.engines / "small.log") in done.stderr and "docs/engines.md" in done.stderr
    assert not shop.prefix.exists() and shop.leftovers() == set()


def test_an_unreachable_index_fails_with_the_reason(shop: EngineShop) -> None:
    del shop.env["PIP_NO_INDEX"], shop.env["PIP_FIND_LINKS"]
    done = shop.run(
        "setup", "--engine", "small", PIP_INDEX_URL="http://user:swordfish@127.0.0.1:9/simple", PIP_RETRIES="0"
    )
    assert done.returncode == 3 and "Small cannot be installed" in done.stderr
    assert "swordfish" not in done.stderr + (shop.engines / "small.log").read_text()


def test_an_engine_that_cannot_be_imported_is_removed_and_its_own_error_shown(shop: EngineShop) -> None:
    make_engine_wheels(shop.wheels, "1.2", "raise RuntimeError('no libsmall.so.3')")
    done = shop.run("setup", "--engine", "small")
    assert done.returncode == 3
    assert "the installed Small cannot be imported: RuntimeError: no libsmall.so.3" in done.stderr
    assert "Traceback" not in done.stderr and "Traceback" in (shop.engines / "small.log").read_text()
    assert not shop.prefix.exists() and shop.leftovers() == set()


def test_a_failed_update_leaves_the_old_environment(shop: EngineShop) -> None:
    assert shop.run("setup", "--engine", "small").returncode == 0
    write_engine_plug_ins(shop.plug_ins, "1.9")
    assert shop.run("setup", "--engine", "small").returncode == 3
    assert shop.installed()["small-core"] == "1.2"


def wait_for(condition: object, shop: EngineShop) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_setup_that_was_killed_leaves_nothing_that_is_used(shop: EngineShop, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    make_engine_wheels(shop.wheels, "1.2", f"open({str(fifo)!r}).read()")
    killed = shop.popen("setup", "--engine", "small")
    with fifo.open("w"):  # the import has begun: everything is installed, nothing verified
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=30)
    assert not shop.prefix.exists() and len(shop.leftovers()) == 1
    listed = json.loads(shop.run("engines", "--json").stdout)
    assert [each["installed"] for each in listed if each["engine"] == "small"] == [False]
    make_engine_wheels(shop.wheels, "1.2")
    assert shop.run("setup", "--engine", "small").returncode == 0
    assert shop.leftovers() == set()


def test_an_unfinished_environment_of_another_host_is_left_alone(shop: EngineShop) -> None:
    (shop.engines / ".small.new-1@node-7").mkdir(parents=True)
    assert shop.run("setup", "--engine", "small").returncode == 0
    assert shop.leftovers() == {".small.new-1@node-7"}


def test_of_two_starts_one_makes_the_environment_and_the_other_waits(shop: EngineShop, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    make_engine_wheels(shop.wheels, "1.2", f"open({str(fifo)!r}).read()")
    first = shop.popen("setup", "--engine", "small")
    with fifo.open("w"):
        second = shop.popen("setup", "--engine", "small")
        assert second.stderr is not None and "waiting for it" in second.stderr.readline()
    for start in (first, second):
        out, err = start.communicate(timeout=60)
        assert start.returncode == 0, err
        assert out.startswith(str(shop.prefix))
    assert shop.installed()["small-core"] == "1.2"


def test_an_environment_of_the_users_own_is_used_and_never_replaced(shop: EngineShop) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(shop.prefix)], check=True)
    refused = shop.run("setup", "--engine", "small")
    assert refused.returncode == 3 and "was not created by primus, and has no Small" in refused.stderr
    site = next(shop.prefix.glob("lib/python3*/site-packages"))
    (site / "small/core").mkdir(parents=True)
    (site / "small/core/__init__.py").write_text("__version__ = '1.5'\n")
    done = shop.run("setup", "--engine", "small")
    assert done.returncode == 0 and "small 1.5" in done.stdout and done.stderr == ""


def test_an_environment_whose_interpreter_is_on_other_machines_is_left_alone(shop: EngineShop) -> None:
    assert shop.run("setup", "--engine", "small").returncode == 0
    (shop.prefix / "bin/python").unlink()
    (shop.prefix / "bin/python").symlink_to("/opt/elsewhere/python3")
    done = shop.run("setup", "--engine", "small")
    assert done.returncode == 3 and "is not on this machine" in done.stderr
    assert (shop.prefix / "primus-engine.json").exists()


def test_a_folder_that_cannot_be_made_is_named_with_another_choice(shop: EngineShop, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shop.env["PRIMUS_ENGINES"] = str(tmp_path / "file")
    done = shop.run("setup", "--engine", "small")
    assert done.returncode == 3 and "PRIMUS_ENGINES=" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "smal"], "did you mean 'small'?"),
        ([], "setup needs an engine"),
        (["--with", "--index-url=x"], "expected"),
        (["--with=tracker,-r"], "--with -r: not the name of a package"),
        (["--engine", "bare"], "use an image"),
    ],
)
def test_what_cannot_be_set_up_is_refused_with_what_to_do(shop: EngineShop, words: list[str], said: str) -> None:
    bare = "# Bare\ntitle: Bare\nmodule: bare\npackage: bare\nversions: '>=1'\nremedy: use an image\n"
    (shop.plug_ins / "engines/bare.yaml").write_text(bare)
    done = shop.run("setup", *words)
    assert done.returncode in (2, 3) and said in done.stderr
    assert not shop.engines.exists()


def test_scripts_of_the_environment_name_its_interpreter_at_its_place(shop: EngineShop) -> None:
    assert shop.run("setup", "--engine", "small").returncode == 0
    activate = (shop.prefix / "bin/activate").read_text()
    assert str(shop.prefix) in activate and ".new-" not in activate
