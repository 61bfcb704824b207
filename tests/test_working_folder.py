"""No file in the working folder shadows a module, in any process that a command starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import cli
from primus import interpreter
from primus.data.process_pool import process_pool

NAMES = (
    "abc argparse ast asyncio base64 bisect calendar code collections concurrent contextlib copy csv ctypes dataclasses"
    " datetime enum fcntl functools getpass glob hashlib heapq importlib inspect io json locale logging math"
    " multiprocessing operator pathlib pickle platform queue random re resource runpy select selectors shutil signal"
    " site socket statistics string struct subprocess sysconfig tempfile threading token tokenize traceback types"
    " typing uuid warnings weakref msgspec numpy psutil rich tensorboard torch wandb yaml sitecustomize usercustomize"
).split()
"""What a user may call a script: modules of Python, of our dependencies, and those that the interpreter looks for."""
EXPERIMENT = """\
workspace: out
modules:
  pre_trainer:
    framework: native
    model: tiny
    overrides: {mock_data: true, seq_length: 16, train_iters: 2, micro_batch_size: 1, bf16: false, lr: 1.0e-2,
                compile: false, num_workers: 2}
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder in which every module that a command may want is a file that says so and ends the process."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"import os\nopen('imported', 'a').write('{name} ')\nos._exit(66)\n")
    shutil.copytree(Path(__file__).parent / "fakes" / "shadow", tmp_path / "primus")
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    return tmp_path


def command(folder: Path, *words: str, python_path: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The command as it is installed, with its interpreter's own start-up."""
    program = Path(sys.executable).with_name("primus-cli")
    path = {"PYTHONPATH": python_path} if python_path else {}
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | path | env
    return subprocess.run(
        [sys.executable, str(program), *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=150
    )


def check(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    imported = folder / "imported"
    assert not imported.exists(), f"imported from the working folder: {imported.read_text()}"
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.native
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_training_imports_nothing_from_the_working_folder(hostile: Path, nproc: str) -> None:
    words = ("--", "train", "pretrain", "--config", "night.yaml")
    check(command(hostile, "direct", "--nproc", nproc, *words, OMP_NUM_THREADS="1"), hostile)


@pytest.mark.native
@pytest.mark.slow
def test_a_preflight_with_measurements_imports_nothing_from_the_working_folder(hostile: Path) -> None:
    words = ("--", "train", "pretrain", "--config", "night.yaml", "--preflight", "full")
    done = command(hostile, "direct", *words, OMP_NUM_THREADS="1")
    assert not (hostile / "imported").exists(), (hostile / "imported").read_text()
    assert done.returncode in (0, 3), done.stderr  # a busy machine may not be fit
    assert "run the same by hand" not in done.stderr


def test_the_environment_is_looked_at_without_the_working_folder(hostile: Path) -> None:
    check(command(hostile, "direct", "--", "env", "show"), hostile)


def test_python_hooks_import_nothing_from_the_working_folder(hostile: Path) -> None:
    hooks = hostile / "hooks" / "config" / "schema"
    hooks.mkdir(parents=True)
    (hooks / "helper.py").write_text("VALUE = '7'\n")
    (hooks / "1_declared.py").write_text(
        "import random, queue, json\nfrom helper import VALUE\nfrom primus.hook import HookContext, Settings, hook\n\n"
        "@hook\ndef set_it(context: HookContext) -> Settings:\n    return Settings(env={'FROM_HOOK': VALUE})\n"
    )
    (hooks / "2_plain.py").write_text("import random, json, helper\nprint('env.B=' + helper.VALUE)\n")
    check(command(hostile, "direct", "--", "config", "schema"), hostile)


def test_modules_and_code_import_nothing_from_the_working_folder(hostile: Path) -> None:
    code = interpreter.build_code_command(sys.executable, "import json, random, sys; print(json.dumps('' in sys.path))")
    module = interpreter.build_module_command(sys.executable, "this")
    for python_path in ("", f":{cli.SOURCE}", f"{cli.SOURCE}:", f"{cli.SOURCE}::/nowhere"):
        environ = interpreter.drop_empty_python_path({**os.environ, "PYTHONPATH": python_path})
        for argv in (code, module):
            done = subprocess.run(argv, cwd=hostile, env=environ, capture_output=True, text=True, timeout=30)
            check(done, hostile)


def test_children_of_multiprocessing_import_nothing_from_the_working_folder(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    with process_pool(2) as pool:
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
    assert not (hostile / "imported").exists(), (hostile / "imported").read_text()


def test_what_python_path_names_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_module.py").write_text("VALUE = 3\n")
    (tmp_path / "here_module.py").write_text("VALUE = 4\n")
    code = "import own_module, here_module; print(own_module.VALUE + here_module.VALUE)"
    for here in (str(tmp_path), "."):
        environ = {**os.environ, "PYTHONPATH": f"{tmp_path}/mine:{here}"}
        argv = interpreter.build_code_command(sys.executable, code)
        done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=30)
        assert done.stdout == "7\n", done.stderr


def test_the_folder_of_this_package_may_be_the_working_folder() -> None:
    argv = interpreter.build_module_command(sys.executable, "primus.cli.main", "--version")
    done = subprocess.run(argv, cwd=cli.SOURCE, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_garbage_is_collected_rarely_until_training_begins(tmp_path: Path) -> None:
    (tmp_path / "thresholds.py").write_text(
        "import gc\nfrom primus.interpreter import restore_garbage_collection\n"
        "print(gc.get_threshold()[0])\nrestore_garbage_collection()\nprint(*gc.get_threshold())\n"
    )
    line = interpreter.build_module_command(sys.executable, "thresholds")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    early, late = subprocess.check_output(line, env=environ, text=True, timeout=60).splitlines()
    usual = subprocess.check_output([sys.executable, "-c", "import gc; print(*gc.get_threshold())"], text=True)
    assert int(early) == interpreter.NUM_ALLOCATIONS_BETWEEN_COLLECTIONS
    assert late == usual.strip()
