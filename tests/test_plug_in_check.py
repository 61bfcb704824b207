"""`python -m primus.plug_in_check` compares plug-in files with their contracts, members and types."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import cli
from primus import registry
from primus.plug_in_check import KINDS

EXAMPLES = Path(__file__).parents[1] / "examples/plug-ins"
BROKEN = {
    "frameworks/wrong_type.py": (
        '"""Wrong type."""\n\n\ndef check(experiment: int) -> None: ...\ndef train(experiment, attempt): ...\n',
        'wrong_type.py:4: error: Incompatible types in assignment (expression has type "Callable[[int], None]"',
        "the contract: check(experiment: Experiment) -> None",
    ),
    "frameworks/wrong_optional.py": (
        '"""Wrong optional."""\ndef check(experiment): ...\ndef train(experiment, attempt): ...\nKEYS = 3\n',
        "wrong_optional.py:4: error: Incompatible types in assignment",
        "the contract: KEYS: Collection[str]",
    ),
    "sources/wrong_result.py": (
        '"""Wrong result."""\n\n\ndef documents() -> list[int]:\n    return [1]\n',
        "wrong_result.py:4: error: Incompatible types in assignment",
        "the contract: documents() -> Iterator[str]",
    ),
    "sources/wrong_body.py": (
        '"""Wrong body."""\nfrom collections.abc import Iterator\n\n\ndef documents() -> Iterator[str]:\n    yield 1\n',
        "wrong_body.py:6: error: ",
        'expected type "str"',
    ),
    "tasks/slurm.py": (
        '"""Named like a runtime."""\nfrom msgspec import Struct as Options\ndef run(options, context): ...\n',
        "tasks/slurm.py: a runtime has the name of the task",
        "rename the file",
    ),
    "tasks/group/no_options.py": (
        '"""No options."""\ndef run(options, context): ...\n',
        "task 'group no_options' has no Options",
        "define Options: type[Struct]",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _mypy_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the folders of all tests: mypy takes most of its time for the modules of primus and of Python,
    which `make lint` has read already."""
    folder, of_lint = tmp_path_factory.mktemp("mypy"), EXAMPLES.parents[1] / ".mypy_cache"
    if of_lint.exists():
        shutil.copytree(of_lint, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MYPY_CACHE_DIR", str(folder))
        yield


def run_check(*files: Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "primus.plug_in_check", *map(str, files)]
    return subprocess.run(command, cwd=cwd, env=cli.environment(**env), capture_output=True, text=True, check=False)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.slow
def test_built_in_plug_ins_and_examples_have_the_types_of_their_contracts() -> None:
    pytest.importorskip("mypy")
    examples = sorted(path for kind in KINDS for path in (EXAMPLES / kind).rglob("*.py"))
    files = [
        file
        for kind in KINDS
        for name in registry.list_plug_ins(kind)
        if (file := registry.find_plug_in_file(kind, name))
    ]
    assert len(files) > 40 and examples
    files += examples  # in one run of mypy, which reads the package once
    done = run_check(*files, cwd=registry.PACKAGE.parents[1])
    assert (done.returncode, done.stdout) == (0, f"{len(files)} plug-ins implement their contracts\n"), done.stderr


def test_broken_files_are_reported_with_line_and_contract(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    files = [write(tmp_path, name, text) for name, (text, *_) in BROKEN.items()]
    good = write(tmp_path, "frameworks/good.py", "def check(e): ...\ndef train(e, attempt): ...\nKEYS = {'a'}\n")
    done = run_check(*files, good, cwd=tmp_path)
    assert done.returncode == 1
    for _, problem, contract in BROKEN.values():
        assert problem in done.stderr
        assert contract in done.stderr
    assert "good.py" not in done.stderr
    assert "shadow" not in done.stderr


def test_what_is_wrong_in_an_imported_module_is_not_reported(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "helper.py").write_text("count: int = 'many'\n")
    file = write(
        tmp_path, "frameworks/good.py", "import helper\ndef check(e): ...\ndef train(e, attempt): ...\nKEYS = {'a'}\n"
    )
    done = run_check(file, cwd=tmp_path, PYTHONPATH=str(tmp_path), MYPYPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "1 plug-ins implement their contracts\n"), done.stderr


def test_without_files_every_plug_in_of_the_folders_is_checked(tmp_path: Path) -> None:
    write(tmp_path, "sources/one.py", '"""One."""\nx = 1\n')
    write(tmp_path, "sources/two.py", '"""Two."""\ndef documents():\n    yield "a"\n')
    done = run_check(cwd=tmp_path, PRIMUS_PLUGINS=str(tmp_path))
    assert done.returncode == 1
    assert "source 'one' has neither documents nor DATASET" in done.stderr
    assert "two" not in done.stderr
    (tmp_path / "sources/one.py").unlink()
    assert run_check(cwd=tmp_path, PRIMUS_PLUGINS=str(tmp_path)).stdout == "1 plug-ins implement their contracts\n"


@pytest.mark.parametrize(
    ("name", "problem"), [("elsewhere/x.py", "not in the folder of a kind"), ("frameworks/none.py", "no such file")]
)
def test_a_file_that_is_not_a_plug_in_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    if "none" not in name:
        write(tmp_path, name, "")
    done = run_check(tmp_path / name, cwd=tmp_path)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
