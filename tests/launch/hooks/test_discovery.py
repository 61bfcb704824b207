"""Hooks are found by their place and name, and read for what they declare without being run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from primus.errors import UsageError
from primus.launch.hooks import discovery
from primus.plan import Action


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


def write(file: Path | str, text: str = "") -> Path:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def found(environ: dict[str, str], task: str = "train pretrain", *, starts_workers: bool = True) -> tuple[Action, ...]:
    return discovery.find_hooks(task, environ, starts_workers=starts_workers)


def names(actions: tuple[Action, ...]) -> list[str]:
    return [f"{action.stage} {action.file}" for action in actions]


def test_general_ones_come_first_then_by_number_then_by_place(tmp_path: Path, environ: dict[str, str]) -> None:
    shared, plug_ins, home = (str(tmp_path / name) for name in ("shared", "plug-ins", "config"))
    for file in (
        "hooks/10_z.sh",
        "hooks/train/2_b.sh",
        "hooks/train/pretrain/1_a.py",
        "hooks/train/pretrain/before/0_a.sh",
        "hooks/after/1_a.sh",
        "hooks/train/failure/1_a.sh",
        "hooks/preflight/1_a.sh",
        f"{shared}/2_same.sh",
        f"{plug_ins}/hooks/2_same.sh",
        f"{home}/primus/hooks/2_same.sh",
        "hooks/2_same.sh",
    ):
        write(file)
    environ |= {"PRIMUS_HOOKS": f"{shared}:{shared}", "PRIMUS_PLUGINS": plug_ins}
    assert names(found(environ)) == [
        f"before {home}/primus/hooks/2_same.sh",
        f"before {plug_ins}/hooks/2_same.sh",
        f"before {shared}/2_same.sh",
        "before hooks/2_same.sh",
        "before hooks/10_z.sh",
        "before hooks/train/2_b.sh",
        "before hooks/train/pretrain/before/0_a.sh",
        "before hooks/train/pretrain/1_a.py",
        "after hooks/after/1_a.sh",
        "failure hooks/train/failure/1_a.sh",
    ]


def test_a_task_that_starts_no_workers_has_only_its_own(environ: dict[str, str]) -> None:
    write("hooks/1_a.sh")
    write("hooks/data/prepare/1_b.sh")
    assert names(found(environ, "data prepare", starts_workers=False)) == ["before hooks/data/prepare/1_b.sh"]


def test_names_without_a_number_come_last_in_the_order_of_the_alphabet(environ: dict[str, str]) -> None:
    for name in ("prepare.py", "check.sh", "10_b.sh", "2_a.sh", "1a.sh", "setup_2.sh", "setup_10.sh"):
        write(f"hooks/{name}")
    assert [Path(each.file).name for each in found(environ)] == [
        "1a.sh",
        "2_a.sh",
        "10_b.sh",
        "check.sh",
        "prepare.py",
        "setup_2.sh",
        "setup_10.sh",
    ]


def test_an_experiment_has_the_hooks_of_its_backend_last(environ: dict[str, str]) -> None:
    write("hooks/train/pretrain/native/1_a.sh")
    write("hooks/train/pretrain/native/after/1_b.sh")
    write("hooks/train/pretrain/other/1_c.sh")
    write("hooks/train/pretrain/2_d.sh")
    assert names(discovery.find_hooks("train pretrain", environ, starts_workers=True, framework="native")) == [
        "before hooks/train/pretrain/2_d.sh",
        "before hooks/train/pretrain/native/1_a.sh",
        "after hooks/train/pretrain/native/after/1_b.sh",
    ]
    assert names(found(environ)) == ["before hooks/train/pretrain/2_d.sh"]


def test_hooks_of_a_checkout_in_the_guides_folder_are_found_before_the_users_own(environ: dict[str, str]) -> None:
    write("runner/helpers/hooks/train/pretrain/01_check_environment.sh")
    write("runner/helpers/hooks/train/pretrain/03_setup_monitoring.sh")
    write("hooks/train/pretrain/01_a.sh")
    assert names(found(environ)) == [
        "before hooks/train/pretrain/01_a.sh",
        "before runner/helpers/hooks/train/pretrain/01_check_environment.sh",
        "before runner/helpers/hooks/train/pretrain/03_setup_monitoring.sh",
    ]


@pytest.mark.parametrize(
    "name", ["README", "README.md", "1_a.sh~", ".1_a.sh", "1_a.sh.bak", "#1_a.sh#", "1_a.txt", "_1.py", "__init__.py"]
)
def test_other_files_are_no_hooks(environ: dict[str, str], name: str) -> None:
    write(f"hooks/{name}", "# primus: nonsense")
    assert found(environ) == ()


def test_what_is_no_file_is_no_hook(environ: dict[str, str]) -> None:
    Path("hooks/1_a.sh").mkdir(parents=True)
    os.mkfifo("hooks/2_b.sh")
    assert found(environ) == ()


def test_a_file_declares_itself_in_its_name_and_first_lines(environ: dict[str, str]) -> None:
    write("hooks/1_a.sh", "#!/bin/sh\n# primus: once, lock timeout=5\n")
    write("hooks/2_b.once.py", "# primus: timeout=1.5s\n")
    write("hooks/3_c.sh", "\n" * 20 + "# primus: once\n")
    first, second, third = found(environ)
    assert (first.once, first.locked, first.timeout_s) == (True, True, 5)
    assert (second.once, second.locked, second.timeout_s) == (True, False, 1.5)
    assert (third.once, third.locked, third.timeout_s) == (False, False, 600)


def test_the_users_time_limit_is_everyones(environ: dict[str, str]) -> None:
    write("hooks/1_a.sh", "# primus: timeout=5")
    assert [each.timeout_s for each in found(environ | {"PRIMUS_HOOK_TIMEOUT": "7"})] == [7]
    with pytest.raises(UsageError, match=r"\$PRIMUS_HOOK_TIMEOUT: 'soon' is not a time limit"):
        found(environ | {"PRIMUS_HOOK_TIMEOUT": "soon"})


@pytest.mark.parametrize(
    ("line", "problem", "hint"),
    [
        ("# primus: onec", "hooks/1_a.sh:1: '# primus:' has no setting 'onec'", "did you mean 'once'?"),
        ("# primus: timeout=0", "hooks/1_a.sh:1: '0' is not a time limit", "give seconds above 0"),
        ("# primus: timeout=nan", "hooks/1_a.sh:1: 'nan' is not a time limit", "give seconds above 0"),
    ],
)
def test_an_unknown_declaration_is_an_error(environ: dict[str, str], line: str, problem: str, hint: str) -> None:
    write("hooks/1_a.sh", line)
    with pytest.raises(UsageError) as caught:
        found(environ)
    assert (caught.value.problem, caught.value.hint) == (problem, hint)


def test_a_hook_that_cannot_be_read_is_named(environ: dict[str, str]) -> None:
    Path("hooks").mkdir()
    Path("hooks/1_a.sh").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"hook hooks/1_a.sh: cannot be read: No such file"):
        found(environ)


DECORATED = """\
from pathlib import Path
from primus.hook import hook as mark, Settings
import primus.hook

Path("was-run").touch()

@mark
def plain(context): ...

@mark(once=True, timeout_s=3)
def single(context): ...

@mark()
def second(context): ...

@primus.hook.hook(stage="after", lock=True)
def late(context): ...

def other(context): ...
"""


def test_decorated_functions_are_found_without_running_the_file(environ: dict[str, str]) -> None:
    write("hooks/train/1_a.py", DECORATED)
    assert [(each.stage, each.functions, each.once, each.locked, each.timeout_s) for each in found(environ)] == [
        ("before", ("plain", "second"), False, False, 600),
        ("before", ("single",), True, False, 3),
        ("after", ("late",), False, True, 600),
    ]
    assert not Path("was-run").exists()


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("stage='befor'", "unknown stage 'befor'"),
        ("once=ONCE", "must be a literal"),
        ("limit=3", "@hook has no argument 'limit'"),
        ("timeout_s=-1", "'-1' is not a time limit"),
    ],
)
def test_a_decorator_that_cannot_be_read_is_an_error(environ: dict[str, str], call: str, problem: str) -> None:
    write("hooks/1_a.py", f"from primus.hook import hook\n@hook({call})\ndef f(context): ...\n")
    with pytest.raises(UsageError, match=r"hooks/1_a\.py:2: ") as caught:
        found(environ)
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    "text", ["@hook\nasync def f(context): ...", "class A:\n    @hook\n    def f(context): ...", "@hook\nclass A: ..."]
)
def test_only_plain_functions_are_decorated(environ: dict[str, str], text: str) -> None:
    write("hooks/1_a.py", f"from primus.hook import *\n{text}\n")
    with pytest.raises(UsageError, match=r"hooks/1_a\.py:[23]: @hook supports only plain functions at the top level"):
        found(environ)


def test_a_file_that_is_no_python_is_a_script_that_will_say_so(environ: dict[str, str]) -> None:
    write("hooks/1_a.py", "def (:\n")
    assert [each.functions for each in found(environ)] == [()]
