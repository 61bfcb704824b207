"""./primus-cli finds or makes its environment. Everything is real here but pip, which records what it was asked for."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from fakes.torch_wheels import write_torch

REPOSITORY = Path(__file__).parent.parent
BASE_PYTHON = Path(os.path.realpath(sys.executable))
TOOLS = ("cat", "cksum", "cp", "dirname", "grep", "mkdir", "mv", "readlink", "rm", "sed", "sh", "tail", "uname")
"""All that set-up calls, so that no other Python of this machine is found."""

COMMAND = """
import json, sys
print(json.dumps({"argv": sys.argv[1:], "prefix": sys.prefix}))
"""

FAKE_PIP = f"""
import json, os, sys, time
from pathlib import Path

if sys.argv[1] == "config":
    sys.exit()
if sys.argv[1] == "index":
    print("Available versions: 2.13.0+cpu")
    sys.exit()
with open(os.environ["PIP_CALLS"], "a") as calls:
    calls.write(json.dumps({{"argv": sys.argv[1:]}}) + "\\n")
test = Path(os.environ["PIP_CALLS"]).parent
if (test / "pip_fails_once").exists():
    reason = (test / "pip_fails_once").read_text()
    (test / "pip_fails_once").unlink()
    sys.exit(reason)
while (test / "pip_hangs").exists():
    time.sleep(0.02)
(Path(sys.prefix) / "bin/primus-cli").write_text({COMMAND!r})
if not list(Path(sys.prefix).glob("lib/python3*/site-packages/primus-shared.pth")):
    site = next(Path(sys.prefix).glob("lib/python3*/site-packages"))
    sys.path.insert(0, {str(REPOSITORY / "tests")!r})
    from fakes.torch_wheels import write_torch
    write_torch(site, "2.13.0+cpu")
"""

FAKE_PYTHON = """\
#!/bin/sh
# Python without the packages that are installed beside it, whose environments hold a pip that only writes down
[ "$1 $2" = "-m venv" ] || {{ PYTHONPATH={packages} exec {python} -S "$@"; }}
{python} -S -m venv --without-pip "$3" && cp {pip} "$(echo "$3"/lib/python3*/site-packages)/pip.py"
"""


class Checkout:
    """A copy of the files that set-up reads, in a folder whose name has a space, with a Python to set up with."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "my clone"
        self.root.mkdir()
        for name in ("primus-cli", "pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.root / name)
        (self.root / "src/primus").mkdir(parents=True)
        shutil.copy(REPOSITORY / "src/primus/__init__.py", self.root / "src/primus")
        for room in ("bootstrap", "web"):
            shutil.copytree(REPOSITORY / "src/primus" / room, self.root / "src/primus" / room)
        self.calls = folder / "pip_calls"
        self.pip_fails_once = folder / "pip_fails_once"
        self.pip_hangs = folder / "pip_hangs"
        self.packages = folder / "image/site-packages"
        self.packages.mkdir(parents=True)
        self.bin = folder / "bin"
        self.bin.mkdir()
        (folder / "pip.py").write_text(FAKE_PIP)
        fake = FAKE_PYTHON.format(packages=self.packages, python=BASE_PYTHON, pip=folder / "pip.py")
        self.executable("python3", fake)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.env = {"PATH": str(self.bin), "HOME": str(folder), "PIP_CALLS": str(self.calls)}
        self.env |= {"PRIMUS_MACHINE_ROOT": str(folder / "no devices"), "PRIMUS_TORCH_INDEX": str(folder)}
        self.venv = self.root / ".venv"

    def executable(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def popen(self, *words: str) -> subprocess.Popen[str]:
        command = [str(self.root / "primus-cli"), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def run(
        self, *words: str, script: Path | str | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [str(script or self.root / "primus-cli"), *words]
        return subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=60)

    def installs(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()] if self.calls.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def output(command: Sequence[str | Path], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until_pip_runs(checkout: Checkout) -> None:
    deadline = time.monotonic() + 30
    while not checkout.installs():
        assert time.monotonic() < deadline, "pip was never asked"
        time.sleep(0.02)


def test_python_runs_the_script_as_the_shell_does() -> None:
    words = [sys.executable, "-W", "error", str(REPOSITORY / "primus-cli"), "setup", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Runs the primus command in its environment")
    words[-2:] = ["setup", "--unknown"]
    assert subprocess.run(words, capture_output=True, timeout=60).returncode == 2


def test_the_first_start_makes_the_environment_and_says_so_and_the_second_is_silent(checkout: Checkout) -> None:
    first = checkout.run("--version")
    assert answer(first) == {"argv": ["--version"], "prefix": str(checkout.venv)}
    assert "making" in first.stderr and "this happens once" in first.stderr
    (install,) = checkout.installs()
    assert install["argv"][-1] == ".[native,data]" and "--constraint" in install["argv"]
    second = checkout.run("--version")
    assert answer(second)["prefix"] == str(checkout.venv) and second.stderr == ""
    assert len(checkout.installs()) == 1


def test_it_works_through_a_link_from_another_folder_and_passes_words_on_unchanged(
    checkout: Checkout, tmp_path: Path
) -> None:
    link = tmp_path / "a link"
    link.symlink_to(checkout.root / "primus-cli")
    words = ["direct", "--", "a b", "", "$HOME", "*", "--x='1'", "back\\slash"]
    assert answer(checkout.run(*words, script=link, cwd=tmp_path)) == {"argv": words, "prefix": str(checkout.venv)}
    relative = checkout.run("x", script="./primus-cli", cwd=checkout.root)
    assert answer(relative)["prefix"] == str(checkout.venv)


def test_a_second_start_adds_less_than_50_ms_to_the_interpreters_own(checkout: Checkout) -> None:
    answer(checkout.run())
    plain = [str(checkout.venv / "bin/python"), str(checkout.venv / "bin/primus-cli")]

    def seconds(command: list[str]) -> float:
        started = time.perf_counter()
        subprocess.run(command, env=checkout.env, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - started

    rounds = [(seconds([str(checkout.root / "primus-cli")]), seconds(plain)) for _ in range(15)]
    ours, theirs = (min(column) for column in zip(*rounds, strict=True))  # the least, free of the machine's other load
    assert ours - theirs < 0.05


def test_a_set_up_that_was_killed_is_not_taken_for_whole(checkout: Checkout) -> None:
    checkout.pip_hangs.touch()
    killed = checkout.popen("x")
    wait_until_pip_runs(checkout)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=30)
    checkout.pip_hangs.unlink()
    (checkout.venv / "left-over").touch()
    assert answer(checkout.run("x"))["prefix"] == str(checkout.venv)
    assert len(checkout.installs()) == 2
    assert not (checkout.venv / "left-over").exists()


def test_of_starts_at_the_same_time_one_sets_up_and_the_others_wait(checkout: Checkout) -> None:
    checkout.pip_hangs.touch()
    first = checkout.popen("first")
    wait_until_pip_runs(checkout)
    others = [checkout.popen("other") for _ in range(2)]
    for other in others:
        assert other.stderr is not None
        assert "waiting for it" in other.stderr.readline()
    checkout.pip_hangs.unlink()
    for start in (first, *others):
        out, err = start.communicate(timeout=30)
        assert start.returncode == 0, err
        assert json.loads(out)["prefix"] == str(checkout.venv)
    assert len(checkout.installs()) == 1


def test_waiting_for_another_start_ends(checkout: Checkout) -> None:
    checkout.pip_hangs.touch()
    first = checkout.popen("first")
    wait_until_pip_runs(checkout)
    checkout.env["PRIMUS_LOCK_TIMEOUT_S"] = "0.3"
    late = checkout.run("late")
    checkout.pip_hangs.unlink()
    first.communicate(timeout=30)
    assert late.returncode == 1
    assert "another process has been creating" in late.stderr


def test_a_changed_pin_updates_the_environment_in_place(checkout: Checkout) -> None:
    answer(checkout.run())
    (checkout.venv / "still-here").touch()
    with (checkout.root / "constraints.txt").open("a") as constraints:
        constraints.write("another==1.0\n")
    changed = checkout.run()
    assert "updating" in changed.stderr and (checkout.venv / "still-here").exists()
    assert "another==1.0" in (checkout.venv / "primus-constraints.txt").read_text()
    assert len(checkout.installs()) == 2
    assert checkout.run().stderr == ""


def test_an_environment_that_lost_primus_gets_it_back(checkout: Checkout) -> None:
    answer(checkout.run())
    (checkout.venv / "bin/primus-cli").unlink()
    assert answer(checkout.run())["prefix"] == str(checkout.venv)
    assert len(checkout.installs()) == 2


def test_a_changed_setting_of_a_linter_updates_nothing(checkout: Checkout) -> None:
    answer(checkout.run())
    with (checkout.root / "pyproject.toml").open("a") as project:
        project.write("\n[tool.mypy.more]\n")
    assert checkout.run().stderr == "" and len(checkout.installs()) == 1


def test_a_failed_update_is_tried_again(checkout: Checkout) -> None:
    answer(checkout.run())
    before = (checkout.root / "constraints.txt").read_text()
    (checkout.root / "constraints.txt").write_text(before + "another==1.0\n")
    checkout.pip_fails_once.write_text("ERROR: connection refused")
    assert checkout.run().returncode == 1
    (checkout.root / "constraints.txt").write_text(before)  # half of the update may have been done: not whole either
    assert "updating" in checkout.run().stderr


def test_a_checkout_that_was_moved_makes_its_environment_anew(checkout: Checkout, tmp_path: Path) -> None:
    answer(checkout.run())
    checkout.root = checkout.root.rename(tmp_path / "moved")
    assert answer(checkout.run())["prefix"] == str(checkout.root / ".venv")
    assert len(checkout.installs()) == 2


def test_when_pip_fails_its_reason_is_shown_and_nothing_half_made_stays(checkout: Checkout) -> None:
    checkout.pip_fails_once.write_text("ERROR: Could not install packages due to an OSError: No space left on device\n")
    failed = checkout.run("x")
    assert failed.returncode == 1 and failed.stdout == ""
    assert "No space left on device" in failed.stderr and ".venv.log" in failed.stderr
    assert not checkout.venv.exists()
    assert answer(checkout.run("x"))["argv"] == ["x"]


def test_the_next_python_is_tried_where_torch_is_not_published_for_the_first(checkout: Checkout) -> None:
    shutil.copy(checkout.bin / "python3", checkout.bin / "python3.12")
    checkout.pip_fails_once.write_text("ERROR: No matching distribution found for torch==2.13.0\n")
    done = checkout.run("x")
    assert answer(done)["prefix"] == str(checkout.venv)
    assert "with python3 (" in done.stderr and "with python3.12 (" in done.stderr


def test_a_network_that_is_down_is_not_asked_again_for_each_python(checkout: Checkout) -> None:
    shutil.copy(checkout.bin / "python3", checkout.bin / "python3.12")
    checkout.pip_fails_once.write_text("ERROR: Could not install packages due to an OSError: connection refused\n")
    assert checkout.run("x").returncode == 1
    assert len(checkout.installs()) == 1


def test_without_a_python_that_will_do_it_says_which_was_seen_and_what_to_do(checkout: Checkout) -> None:
    old = checkout.executable("python3.8", "#!/bin/sh\necho 3.8\n")
    checkout.env["PRIMUS_PYTHON"] = str(old)
    failed = checkout.run("x")
    assert failed.returncode == 1 and not checkout.venv.exists()
    assert "no Python 3.10 to 3.13 was found" in failed.stderr and "python3.8 is 3.8" in failed.stderr
    assert "PRIMUS_PYTHON=" in failed.stderr


def test_a_python_that_cannot_make_environments_is_named_with_the_package_that_it_lacks(checkout: Checkout) -> None:
    bare = checkout.executable("bare", f'#!/bin/sh\n[ "$1 $2" != "-m venv" ] || exit 1\nexec {BASE_PYTHON} -S "$@"\n')
    checkout.env["PRIMUS_PYTHON"] = str(bare)
    failed = checkout.run("x")
    assert failed.returncode == 1
    assert "cannot create environments" in failed.stderr and "python3-venv" in failed.stderr


def test_a_folder_that_cannot_be_written_is_named_and_another_one_asked_for(checkout: Checkout) -> None:
    checkout.env["PRIMUS_VENV"] = "/dev/null/venv"
    failed = checkout.run("x")
    assert failed.returncode == 1
    assert "/dev/null/venv cannot be created" in failed.stderr and "PRIMUS_VENV=" in failed.stderr


def test_an_environment_whose_python_this_user_cannot_execute_is_told_from_a_folder_without_permission(
    checkout: Checkout, tmp_path: Path
) -> None:
    private = tmp_path / "python3.11"
    private.touch(mode=0o600)
    assert checkout.run().returncode == 0
    (checkout.venv / "bin" / "python").unlink()
    (checkout.venv / "bin" / "python").symlink_to(private)
    # Neither it nor the folder that a container uses instead can be made, even by root.
    Path(f"{checkout.venv}.lock").unlink()
    for name in (".venv", f".venv-{(checkout.venv / 'primus-place').read_text().strip()}"):
        (checkout.root / f"{name}.lock").mkdir()
    failed = checkout.run("x")
    assert failed.returncode == 1
    assert f"this user cannot execute {private}, the Python of {checkout.venv}" in failed.stderr
    assert "PRIMUS_VENV=" in failed.stderr and "not writable" not in failed.stderr


def test_another_folder_can_be_named(checkout: Checkout, tmp_path: Path) -> None:
    checkout.env["PRIMUS_VENV"] = str(tmp_path / "elsewhere")
    assert answer(checkout.run())["prefix"] == str(tmp_path / "elsewhere")
    assert not checkout.venv.exists()


def test_setup_makes_the_environment_and_prints_only_where_it_is(checkout: Checkout) -> None:
    assert checkout.run("setup").stdout == f"{checkout.venv}\n"
    assert checkout.run("setup", "--dev").stdout == f"{checkout.venv}\n"
    assert [call["argv"][-1] for call in checkout.installs()] == [".[native,data]", ".[native,data,dev]"]
    assert checkout.run("setup").stderr == ""  # an environment with more serves as well
    wrong = checkout.run("setup", "--devel")
    assert wrong.returncode == 2 and "--dev" in wrong.stderr


def test_setup_says_that_the_environment_was_made_without_torch(checkout: Checkout) -> None:
    checkout.run("x")
    assert "PRIMUS_TORCH=auto" not in checkout.run("setup").stderr
    (checkout.venv / "primus-torch").write_text("none")
    done = checkout.run("setup")
    assert "PRIMUS_TORCH=auto ./primus-cli setup installs it" in done.stderr
    assert done.stdout == f"{checkout.venv}\n"


def test_setup_passes_the_engines_on_once_the_environment_is_there(checkout: Checkout) -> None:
    given = answer(checkout.run("setup", "--engine", "torchtitan", "--engine=jax,megatron"))
    assert given == {"argv": ["setup", "--engine", "torchtitan,jax,megatron"], "prefix": str(checkout.venv)}
    assert len(checkout.installs()) == 1
    answer(checkout.run("setup", "--dev", "--engine", "all"))
    assert checkout.installs()[1]["argv"][-1] == ".[native,data,dev]"
    again = answer(checkout.run("setup", "--dev", "--engine", "all", "--dry-run"))
    assert again["argv"] == ["--dry-run", "setup", "--engine", "all"] and len(checkout.installs()) == 2


def test_setup_passes_packages_of_the_user_on_beside_engines_and_alone(checkout: Checkout) -> None:
    alone = answer(checkout.run("setup", "--with", "wandb", "--with=mlflow"))
    assert alone["argv"] == ["setup", "--with", "wandb,mlflow"]
    beside = answer(checkout.run("setup", "--with", "wandb", "--engine", "jax"))
    assert beside["argv"] == ["setup", "--engine", "jax", "--with", "wandb"]
    without_name = checkout.run("setup", "--with")
    assert without_name.returncode == 2 and "--with needs a package" in without_name.stderr


def test_a_dry_setup_makes_nothing(checkout: Checkout) -> None:
    for words in (["--dry-run"], ["--engine", "all", "--dry-run"]):
        done = checkout.run("setup", *words)
        assert done.returncode == 0 and f"makes {checkout.venv}" in done.stderr
    assert not checkout.venv.exists() and checkout.installs() == []


def test_setup_refuses_an_engine_without_a_name(checkout: Checkout) -> None:
    wrong = checkout.run("setup", "--engine")
    assert wrong.returncode == 2 and "--engine needs a name" in wrong.stderr
    assert not checkout.venv.exists()


def test_the_environment_of_another_place_is_left_alone(checkout: Checkout) -> None:
    answer(checkout.run())
    place = (checkout.venv / "primus-place").read_text().strip()
    (checkout.venv / "primus-place").write_text("sles-15-aarch64\n")
    assert answer(checkout.run())["prefix"] == f"{checkout.venv}-{place}"
    assert (checkout.venv / "bin/primus-cli").exists()


def test_a_container_leaves_an_environment_alone_whose_interpreter_is_outside(checkout: Checkout) -> None:
    answer(checkout.run())
    place = (checkout.venv / "primus-place").read_text().strip()
    if "-container" not in place:  # what a file at the root decides
        pytest.skip("only in a container")
    (checkout.venv / "bin/python").unlink()
    (checkout.venv / "bin/python").symlink_to("/interpreters/of/the/host/python3")
    assert answer(checkout.run())["prefix"] == f"{checkout.venv}-{place}"
    assert (checkout.venv / "bin/primus-cli").exists()


def test_the_environment_of_another_checkout_is_not_taken_from_it(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Checkout(tmp_path / "other")
    answer(other.run())
    checkout.env["PRIMUS_VENV"] = str(other.venv)
    refused = checkout.run()
    assert refused.returncode == 2 and f"is the environment of {other.root}" in refused.stderr
    shutil.rmtree(other.root / "src", ignore_errors=True)
    (other.root / "primus-cli").unlink()
    assert answer(checkout.run())["prefix"] == str(other.venv), "nobody needs it any more"


def test_an_environment_that_someone_else_made_is_left_alone(checkout: Checkout) -> None:
    venv.create(checkout.venv)
    assert answer(checkout.run())["prefix"] != str(checkout.venv)
    assert not (checkout.venv / "bin/primus-cli").exists()


def activate(checkout: Checkout, folder: Path) -> None:
    """An active environment with primus, as `pip install` leaves it."""
    venv.create(folder, symlinks=True)
    script = folder / "bin/primus-cli"
    script.write_text(f"#!{folder}/bin/python\n{COMMAND}")
    script.chmod(0o755)
    checkout.env["PATH"] = f"{folder}/bin:{checkout.env['PATH']}"


def test_the_active_environment_is_used_if_it_has_primus_and_nothing_is_made(
    checkout: Checkout, tmp_path: Path
) -> None:
    activate(checkout, tmp_path / "active")
    done = checkout.run("--version")
    assert answer(done)["prefix"] == str(tmp_path / "active")
    assert "not the one of" in done.stderr  # it is another copy of primus: said, since it may be another version
    assert not checkout.venv.exists()
    (link,) = (tmp_path / "active/lib").glob("python3*/site-packages")
    (link / "__editable__.primus-0.1.0.pth").write_text(f"{checkout.root}/src\n")
    assert checkout.run("--version").stderr == ""


def test_another_checkouts_script_on_the_path_is_not_an_installed_primus(checkout: Checkout) -> None:
    shutil.copy(REPOSITORY / "primus-cli", checkout.bin / "primus-cli")
    assert answer(checkout.run())["prefix"] == str(checkout.venv)


def test_a_primus_that_python3_can_import_is_used_and_nothing_is_made(checkout: Checkout) -> None:
    package = checkout.packages / "primus/cli"
    package.mkdir(parents=True)
    for init in (package.parent, package):
        (init / "__init__.py").touch()
    (package / "main.py").write_text("def main():\n    import sys\n    print(sys.argv)\n    return 7\n")
    done = checkout.run("a b")
    assert (done.returncode, done.stdout) == (7, "['primus-cli', 'a b']\n")
    assert not checkout.venv.exists()


def give_torch(checkout: Checkout, version: str, cuda: str | None = None, hip: str | None = None) -> None:
    """The interpreter's own torch, as an image brings it."""
    write_torch(checkout.packages, version, cuda, hip)


def test_a_torch_that_the_interpreter_has_is_used_and_not_pinned_to_another(checkout: Checkout) -> None:
    give_torch(checkout, "2.9.1+rocm7.0", hip="7.0.1")
    done = checkout.run()
    answer(done)
    assert "using PyTorch 2.9.1 (built for ROCm 7.0)" in done.stderr
    seen = output([checkout.venv / "bin/python", "-c", "import torch; print(torch.__file__)"])
    assert seen.strip() == str(checkout.packages / "torch/__init__.py")
    pins = (checkout.venv / "primus-constraints.txt").read_text()
    assert "\ntorch==" not in pins and "\nmsgspec==" in pins


def test_a_torch_that_is_too_old_is_not_used_and_that_is_said(checkout: Checkout) -> None:
    give_torch(checkout, "2.4.0")
    done = checkout.run()
    assert "PyTorch 2.4.0" in done.stderr and "older than 2.6" in done.stderr
    assert "\ntorch==" in (checkout.venv / "primus-constraints.txt").read_text()


def requirements() -> list[str]:
    text = (REPOSITORY / "pyproject.toml").read_text()
    tables = text[text.index("dependencies = ") : text.index("[project.scripts]")]
    return re.findall(r'"([^"]+)"', tables)


def test_every_requirement_is_pinned_and_set_up_asks_for_the_same_least_torch() -> None:
    pins = {line.split("==")[0].lower() for line in (REPOSITORY / "constraints.txt").read_text().splitlines()}
    names = {re.split("[<>=]", requirement)[0].lower() for requirement in requirements()}
    assert {"torch", "pytest", "msgspec"} <= names <= pins
    least = next(requirement for requirement in requirements() if requirement.startswith("torch"))
    assert f"MIN_TORCH={least.removeprefix('torch>=')} " in (REPOSITORY / "primus-cli").read_text()
