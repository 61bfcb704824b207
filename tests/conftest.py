"""What every test shares: a clean environment, golden files, and which marked tests this machine can run."""

from __future__ import annotations

import difflib
import gc
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from components import why_absent
from engine_python import why_not_installed
from primus import redaction
from primus.interpreter import reduce_garbage_collection

GOLDEN = Path(__file__).parent / "golden"

USER_VARIABLES = (
    "NNODES",
    "NODE_RANK",
    "GPUS_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "COLUMNS",
    "LINES",
    "HF_TOKEN",
    "WANDB_API_KEY",
)
"""Variables that a developer's shell, or readline in a process that starts others, may have set and that change what a
command does."""

USER_PREFIXES = ("PRIMUS_", "SLURM_", "SBATCH_", "SRUN_", "PET_", "TORCHELASTIC_")

SLOW_FOLDERS = (
    "cluster",
    "test_bootstrap.py",
    "bootstrap",
    "launch",
    "frameworks",
    "test_documented_commands.py",
    "data",
)
"""Folders and files that take longest, the longest first."""

SINGLE_FILES = (
    "tests/test_documented_commands.py",
    "tests/frameworks/native/test_interrupted_save.py",
)
"""Files of long tests that share no fixture: each test may run on another process."""

WAITING_FOLDERS = ("tests/cluster/",)
"""Folders whose tests mostly wait: for a scheduler's intervals, for a job's warning, for a lost node's timeout."""

SHARED_FOLDERS = ("tests/frameworks/torchtitan", "tests/frameworks/megatron")
"""Folders of one process each, whose tests share the processes of an engine."""

STATE_NUMBERS = itertools.count()
HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore = ["machines"] + ([] if HAS_TORCH else ["frameworks", "checkpoint", "data", "measure"])
"""Recorded trees hold no tests, and links in rings; where torch is not installed, the control plane is tested alone."""

# A busy machine makes no example wrong, and a change is judged by the examples that its parent passed.
UNTIMED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("repeatable", UNTIMED, derandomize=True, database=None)
hypothesis.settings.register_profile("exploring", UNTIMED)
hypothesis.settings.load_profile("repeatable")

# Modules and tests stay until the end: half of the time of collecting them was spent looking for garbage among them.
gc.disable()

# Before torch is imported: the tensors are small, and a few cores serve several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the golden files, do not compare")


def pytest_report_header() -> str:
    return "torch: installed" if HAS_TORCH else "torch: not installed, so only the control plane is tested"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--renew-golden"):
        items[:] = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
    reasons = {"native": "" if HAS_TORCH else "torch is not installed"}
    if any(item.get_closest_marker("gpu") for item in items):
        reasons["gpu"] = _why_no_gpu()
    for item in items:
        for mark, reason in reasons.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
        for mark in item.iter_markers("engine"):
            absent = [reason for reason in map(why_not_installed, mark.args) if reason]
            if absent:
                item.add_marker(pytest.mark.skip(reason=absent[0]))
        for mark in item.iter_markers("cluster"):
            absent = [reason for reason in map(why_absent, mark.args) if reason]
            if absent:
                item.add_marker(pytest.mark.skip(reason=absent[0]))
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        # The longest first, so that no process ends alone; a file's tests stay together.
        items.sort(key=lambda item: (_start_order(item), item.path not in slow))


def pytest_collection_finish() -> None:
    gc.freeze()  # what stays until the end is skipped from here on
    reduce_garbage_collection()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep most files on one process, so that their module fixtures are made once, and the files of some folders.

    Every other process begins with the folders that wait, and the rest with those that compute: the cores are busy
    while a test waits.
    The marker xdist_group does not work here: pytest 9 ignores the names that pytest-xdist 3.8 gives to tests.
    """
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SINGLE_FILES):
                return nodeid
            shared = (folder for folder in SHARED_FOLDERS if nodeid.startswith(f"{folder}/"))
            return next(shared, None) or super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            takes_waiting = self.nodes.index(node) % 2 == 0
            preferred = (scope for scope in self.workqueue if scope.startswith(WAITING_FOLDERS) == takes_waiting)
            if scope := next(preferred, None):
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return FileScheduling(config, log)


def _start_order(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return SLOW_FOLDERS.index(folder) if folder in SLOW_FOLDERS else len(SLOW_FOLDERS)


def _why_no_gpu() -> str:
    if not HAS_TORCH:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA or ROCm device"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the developer's launch variables and hooks; undo what a task that ran in this process set and learned."""
    before = dict(os.environ)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-config"))
    # One for each test: `jobs list` asks the schedulers of all jobs that were submitted from here.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state" / str(next(STATE_NUMBERS))))
    for name in list(os.environ):
        if name in USER_VARIABLES or name.startswith(USER_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PRIMUS_LAUNCHER_FILE", "")
    with redaction.scope():
        yield
    os.environ.clear()
    os.environ.update(before)
    if threads := getattr(sys.modules.get("torch"), "set_num_threads", None):
        threads(int(os.environ["OMP_NUM_THREADS"]))  # idle threads of a pool spin, in every test that follows


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("name.txt", text)`` asserts that ``tests/golden/name.txt`` holds `text`; `make golden` renews it."""
    renewing: bool = request.config.getoption("--renew-golden")

    def check(name: str, text: str) -> None:
        path = Path(os.path.normpath(GOLDEN / name))  # resolves ".." also where tests/golden is not there
        if renewing:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist: `make golden` writes it, then read what it wrote")
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "now", lineterm="")
            pytest.fail(f"{name} changed; `make golden` renews it if that was meant\n" + "\n".join(diff), pytrace=False)

    return check
