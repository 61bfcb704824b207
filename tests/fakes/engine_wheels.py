"""Small wheels that say that they are an engine, with the engine's file and a backend that drives it."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

ENGINE = """\
# A small engine of the tests
title: Small
module: small.core
package: small-core
versions: ">=1,<2"
needs: []
checkout_variables: [SMALL_PATH]
python:
  ">=3.10":
    packages: [small-core=={version}]
    pins: [small-base==2.0]
    download_mb: 1
"""
BACKEND = '''\
"""Train with the small engine of the tests."""

ENGINES = ("small",)


def check(experiment):
    """Accept every experiment."""


def train(experiment, attempt):
    """Print the engine's version and the interpreter to the log of the rank."""
    import sys

    import small.core

    for step in range(1, experiment.trainer.training.train_iters + 1):
        attempt.beat("train", step)
        attempt.event("step", step=step, loss=1.0)
    print("engine", small.core.__version__, sys.executable)
'''
EXPERIMENT = """\
exp_name: small
modules:
  pre_trainer:
    framework: small
    model: llama3.2_1B
    overrides: {mock_data: true, train_iters: 2, device: cpu}
"""


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> Path:
    """A wheel of pure Python."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    texts = {**files, f"{info}/METADATA": "\n".join(metadata) + "\n", f"{info}/WHEEL": wheel}
    record = "".join(f"{path},,\n" for path in [*texts, f"{info}/RECORD"])
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**texts, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path


def make_engine_wheels(folder: Path, version: str, code: str = "") -> None:
    """The engine in a version, whose module runs `code`, and the package that it requires."""
    core = {"small/core/__init__.py": f"import small_base\n__version__ = {version!r}\n{code}\n"}
    make_wheel(folder, "small-core", version, core, ("small-base>=1",))
    for base in ("2.0", "2.5"):
        make_wheel(folder, "small-base", base, {"small_base.py": f"__version__ = {base!r}\n"})


def write_engine_plug_ins(folder: Path, version: str = "1.2") -> None:
    """The engine's file, which pins a version, and its backend, in a folder of plug-ins."""
    for name, text in {"engines/small.yaml": ENGINE.format(version=version), "frameworks/small.py": BACKEND}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def offline_variables(wheels: Path, plug_ins: Path, engines: Path) -> dict[str, str]:
    """Variables with which pip takes packages from a folder only, and environments are made in `engines`."""
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
        "UV_NO_CONFIG": "1",
        "PRIMUS_PLUGINS": str(plug_ins),
        "PRIMUS_ENGINES": str(engines),
    }
