"""Patches of upstream packages are applied in their range, logged, and fatal when they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import primus
from fakes import cli
from primus import patch
from primus.errors import PrimusError, UsageError
from primus.patch import includes_version

PATCH = """\
from datetime import date
from primus.patch import Patch
PATCH = Patch(target={target!r}, versions={versions!r}, reason="it is slow", link="https://example.org/1",
              expires=date({expires}), backend={backend!r}, priority={priority})
def apply():
    {body}
"""

OWN_PATCHES = {file.stem.replace("_", "-") for file in Path(primus.__file__).parent.rglob("patches/*.py")}
"""Patches of the package itself, those of its frameworks included."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of plug-ins of its own."""
    monkeypatch.setenv("PRIMUS_PLUGINS", f"{tmp_path}/plug-ins:{cli.PLUGINS}")
    (tmp_path / "plug-ins/patches").mkdir(parents=True)
    return tmp_path / "plug-ins/patches"


def write(folder: Path, name: str, body: str = "print('doing it')", **changes: object) -> None:
    values = {"target": "msgspec", "versions": ">=0.1", "expires": "2100, 1, 1", "backend": None, "priority": 50}
    (folder / f"{name}.py").write_text(PATCH.format(body=body, **(values | changes)))


def states(environ: dict[str, str] | None = None, backend: str | None = None) -> dict[str, str]:
    found = patch.choose_patches(environ or {}, lambda: backend)
    return {choice.name: choice.state for choice in found if choice.name not in OWN_PATCHES}


@pytest.mark.parametrize(
    ("versions", "inside", "outside"),
    [
        (
            ">=2.6,<2.14",
            ["2.6", "2.6.0", "2.13.0+cpu", "2.13.9.post1"],
            ["2.5.9", "2.14", "2.14.0a0", "2.14.0.dev2", "2.6rc1"],
        ),
        ("0.8~1.2", ["0.8", "1.0", "1.2.0"], ["0.7.9", "1.2.1"]),
        ("1.*", ["1", "1.0", "1.99.3", "1.5rc1"], ["2.0", "0.9", "10.1"]),
        ("==1.2.*", ["1.2", "1.2.7"], ["1.20", "1.3"]),
        ("!=1.2.*", ["1.3"], ["1.2.7"]),
        ("1.2", ["1.2", "1.2.0", "1.2+local"], ["1.2.1", "1.2rc1", "1.2.post1"]),
        (">1.2", ["1.2.1", "1.3"], ["1.2", "1.2.post1"]),
        ("<=1.2, !=1.1", ["1.2", "1.0", "1.2rc1"], ["1.1", "1.2.1"]),
        (">=2.0rc2", ["2.0rc2", "2.0"], ["2.0rc1", "2.0b3"]),
    ],
)
def test_ranges_follow_pep_440_and_primus(versions: str, inside: list[str], outside: list[str]) -> None:
    assert [version for version in inside if not includes_version(versions, version)] == []
    assert [version for version in outside if includes_version(versions, version)] == []


@pytest.mark.parametrize("versions", ["", "new", ">=", "=>1", ">=1.*", "~=1.2", "1.2 1.3", ">=1,,<2"])
def test_an_invalid_range_is_an_error(versions: str) -> None:
    with pytest.raises(PrimusError, match="invalid range of versions"):
        includes_version(versions, "1.0")


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_any_two_versions_are_ordered(first: list[int], second: list[int]) -> None:
    a, b = (".".join(map(str, parts)) for parts in (first, second))
    below, above, same = (includes_version(f"{sign}{b}", a) for sign in ("<", ">", "=="))
    assert [below, above, same].count(True) == 1
    assert includes_version(f"<={b}", a) == (below or same)
    assert includes_version(f">={b}", a) == (above or same)
    assert includes_version(f"!={b}", a) == (not same)


def test_the_state_of_each_patch_is_reported(folder: Path) -> None:
    write(folder, "plain")
    write(folder, "old", expires="2020, 1, 1")
    write(folder, "range", versions="<0.0.1")
    write(folder, "absent", target="no-such-distribution")
    write(folder, "other", backend="megatron")
    write(folder, "both", backend=("megatron", "torchtitan"))
    write(folder, "first", priority=1)
    with (folder / "plain.py").open("a") as file:
        file.write("def is_needed():\n    return True\n")
    write(folder, "idle", body="pass\ndef is_needed():\n    return False")
    found = states(backend="native")
    assert found == {
        "plain": "applies",
        "old": "expired",
        "range": "out of range",
        "absent": "not installed",
        "other": "other backend",
        "both": "other backend",
        "first": "applies",
        "idle": "not needed",
    }
    assert next(iter(found)) == "first", "lower priorities come first"
    assert states(backend="")["other"] == "other backend", "a task that trains nothing imports no engine to patch it"
    assert states(backend="megatron")["other"] == "applies"
    assert states(backend="torchtitan")["both"] == states(backend="megatron")["both"] == "applies"


def test_a_patch_is_valid_on_the_day_of_expiry(folder: Path) -> None:
    write(folder, "old", expires="2020, 1, 1")
    found = {choice.name: choice.state for choice in patch.choose_patches({}, today=date(2020, 1, 1))}
    assert found["old"] == "applies"


def test_the_user_selects_patches_by_name(folder: Path) -> None:
    write(folder, "one_patch")
    write(folder, "two")
    write(folder, "range", versions="<0.0.1")
    assert set(states()) == set(states({"PRIMUS_PATCHES": "all"})) == {"one-patch", "two", "range"}
    assert states({"PRIMUS_PATCHES": "none"}) == {}
    assert list(states({"PRIMUS_PATCHES": "two,one_patch"})) == ["one-patch", "two"]
    with pytest.raises(UsageError) as caught:
        states({"PRIMUS_PATCHES": "tow"})
    assert (caught.value.problem, caught.value.hint) == ("$PRIMUS_PATCHES: no patch 'tow'", "did you mean 'two'?")
    with pytest.raises(UsageError) as caught:
        states({"PRIMUS_PATCHES": "two,range"})
    here = f"it needs msgspec <0.0.1, installed is {version('msgspec')}"
    assert caught.value.problem == f"$PRIMUS_PATCHES: patch 'range' cannot be applied: {here}"


def test_a_checkout_is_patched_by_its_own_version(folder: Path) -> None:
    checkout = folder.parent / "checkout"
    (checkout / "small/core").mkdir(parents=True)
    (checkout / "small/core/__init__.py").touch()
    (checkout / "small/core/package_info.py").write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\n")
    write(folder, "inside", target="no-distribution", versions=">=0.17,<0.18")
    write(folder, "outside", target="no-distribution", versions=">=0.18")
    for name in ("inside", "outside"):
        file = folder / f"{name}.py"
        file.write_text(file.read_text().replace("backend=None", "module='small.core'"))
    found = {choice.name: choice for choice in patch.choose_patches({}, folders=[str(checkout)])}
    assert found["inside"].state == "applies" and found["inside"].installed == "0.17.1"
    assert found["outside"].state == "out of range"


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return cli.run(*words, cwd=folder.parents[1], PRIMUS_PLUGINS=f"{folder.parent}:{cli.PLUGINS}", **env)


def test_workers_apply_patches_before_the_task_and_log_them(folder: Path) -> None:
    write(folder, "b_late")
    write(folder, "a_early", priority=1, expires="2020, 1, 1")
    write(folder, "range", versions="<0.0.1", body="raise ValueError")
    assert run(folder, "direct", "--", "tiny").returncode == 0
    latest = folder.parents[1] / "out/tiny/latest"
    log = (latest / "logs/rank_0.log").read_text().splitlines()
    installed = version("msgspec")
    told = f": msgspec {installed}: it is slow (https://example.org/1)"
    assert log[:4] == [
        "doing it",
        f"patch a-early{told}; it expired on 2020-01-01: check whether it is still needed",
        "doing it",
        f"patch b-late{told}",
    ]
    (event,) = [json.loads(line) for line in (latest / "events.jsonl").read_text().splitlines() if '"patches"' in line]
    assert [(each["name"], each["state"]) for each in event["applied"]] == [
        ("a-early", "expired"),
        ("b-late", "applies"),
    ]
    assert "range" not in "".join(log)
    run(folder, "direct", "--", "tiny", PRIMUS_PATCHES="none")
    assert "patch" not in (latest / "logs/rank_0.log").read_text()


def test_a_failing_patch_fails_the_run_and_is_named(folder: Path) -> None:
    write(folder, "broken", body="1 / 0")
    done = run(folder, "direct", "--", "tiny")
    assert done.returncode == 1
    assert "run failed: patch 'broken' of msgspec" in done.stderr
    assert "broken.py:6: ZeroDivisionError: division by zero" in done.stderr
    assert "PRIMUS_PATCHES=none starts without patches" in done.stderr


def test_a_package_that_fails_on_import_is_no_failure_of_its_patch(folder: Path) -> None:
    modules = folder.parent / "modules"
    (modules / "broken_package").mkdir(parents=True)
    (modules / "broken_package/__init__.py").write_text("raise RuntimeError('no libbroken.so.3')\n")
    body = f"import sys; sys.path.insert(0, {str(modules)!r}); import broken_package"
    write(folder, "import_it", body=body)
    done = run(folder, "direct", "--", "tiny")
    assert done.returncode == 3
    assert "msgspec cannot be imported: RuntimeError at " in done.stderr
    assert "broken_package/__init__.py:1: no libbroken.so.3" in done.stderr
    assert "PRIMUS_PATCHES" not in done.stderr


@pytest.mark.parametrize("words", [["direct"], ["--dry-run", "direct"]])
def test_an_unknown_name_is_refused_before_anything_starts(folder: Path, words: list[str]) -> None:
    write(folder, "known")
    done = run(folder, *words, "--env", "PRIMUS_PATCHES=knwon", "--", "tiny")
    assert done.returncode == 2
    assert done.stderr == "primus-cli: $PRIMUS_PATCHES: no patch 'knwon'\n  did you mean 'known'?\n"
    assert not (folder.parents[1] / "out").exists()


def test_a_replay_reports_other_patches(folder: Path) -> None:
    work = folder.parents[1]
    overrides = "{mock_data: true, seq_length: 8, train_iters: 1}"
    (work / "night.yaml").write_text(
        f"modules: {{pre_trainer: {{framework: abacus, model: tiny, overrides: {overrides}}}}}\n"
    )
    write(folder, "one")
    assert run(folder, "direct", "--", "train", "pretrain", "--config", "night.yaml").returncode == 0
    replay = ("direct", "--", "train", "pretrain", "--replay", "output/night/latest")
    assert run(folder, *replay).returncode == 0
    other = run(folder, *replay, PRIMUS_PATCHES="none")
    assert other.returncode == 3
    assert "patches: one then, none now" in other.stderr


@pytest.mark.native
def test_inductor_gets_library_folders_with_spaces_as_one_word() -> None:
    program = (
        "import shlex\n"
        "from primus import patch, registry\n"
        "registry.load_plug_in(patch.PATCHES, 'inductor_library_paths').apply()\n"
        "from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder\n"
        "options = BuildOptionsBase(compiler='g++', libraries_dirs=['/a b/lib', '/c'])\n"
        "print([word for word in shlex.split(CppBuilder('x', 'x.cpp', options).get_command_line()) if '-L' in word])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=cli.environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "['-L/a b/lib', '-L/c']\n", done.stderr


@pytest.mark.native
@pytest.mark.slow
def test_a_model_compiles_where_the_path_of_torch_has_a_space(tmp_path: Path) -> None:
    environment = tmp_path / "an environment"
    environment.symlink_to(sys.prefix)
    patched = (
        "from primus import patch\n"
        "(choice,) = [each for each in patch.choose_patches({}) if each.name == 'inductor-library-paths']\n"
        "assert choice.applies, choice\n"
        "patch.apply_patch(choice)\n"
    )
    program = (
        "import torch\n"
        "x = torch.randn(8, 8)\n"
        "torch.testing.assert_close(torch.compile(lambda x: (x * 2).sin().sum(0))(x), (x * 2).sin().sum(0))\n"
        "print('compiled')\n"
    )
    env = cli.environment(
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
        TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0",  # slower than one compilation without them
        TORCHINDUCTOR_VEC_ISA_OK="0",  # no trial compilation for each set of vector instructions
    )

    def run(program: str) -> subprocess.CompletedProcess[str]:
        argv = [str(environment / "bin/python"), "-c", program]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)

    if run(program).stdout == "compiled\n":
        pytest.skip("this torch, or the way this environment is linked, does not need the patch")
    done = run(patched + program)
    assert done.stdout == "compiled\n", done.stderr
