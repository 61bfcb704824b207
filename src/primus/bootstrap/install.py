"""Install primus into the environment of this interpreter, with the build of PyTorch for its hardware."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from primus import __version__
from primus.bootstrap import packages, torch_builds
from primus.bootstrap.hardware import read_hardware
from primus.bootstrap.packages import Page, mask
from primus.bootstrap.torch_builds import Build, Hardware

PACKAGE = Path(__file__).parents[1]
PYTORCH_INDEX = "https://download.pytorch.org/whl"
FAILED, STOPPED, NO_BUILD = 1, 3, 4
"""Exit codes: the installer failed; no working build is available; none for this Python, another version may have
one."""

WHEEL_GB = {"cpu": 0.2, "cuda": 0.9, "rocm": 4.5}
LIBRARIES_GB = {"cpu": 0.05, "cuda": 2.5, "rocm": 0.3}
"""Approximate download of PyTorch 2.13 if the index states no size; NVIDIA's libraries are separate packages."""

PINNED_WITH_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "numpy", "setuptools", "sympy", "typing-extensions")
"""Requirements of PyTorch whose pins are dropped with another version of PyTorch than the pinned one."""
SHARED_FILE = "primus-shared.pth"
WISH_FILE = "primus-torch"
"""File with the value of $PRIMUS_TORCH at the installation, for updates of the environment."""

VERIFY = """
import json, torch
found = {"version": torch.__version__, "devices": 0, "problems": []}
assert torch.ones(8).sum().item() == 8, "a sum on the CPU is wrong"
if torch.cuda.is_available():
    found["devices"] = torch.cuda.device_count()
    for index in range(found["devices"]):
        try:
            if torch.ones(8, device=f"cuda:{index}").sum().item() != 8:
                found["problems"].append(f"device {index}: a sum is wrong")
        except RuntimeError as error:
            found["problems"].append(f"device {index}: {str(error).splitlines()[0]}")
print(json.dumps(found))
"""
LIST_PATH = """
import json, sys
print(json.dumps({"path": [entry for entry in sys.path if entry]}))
"""


class InstallError(Exception):
    """The installation is not possible; the message gives the reason."""

    def __init__(self, text: str, code: int = STOPPED) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Choice:
    """A build of PyTorch, and its source."""

    version: str
    """Version as named by the index, including the build."""
    options: tuple[str, ...]
    """Options of pip that select its source."""
    source: str
    size: int | None = None
    """Size of its wheel in bytes."""


def main(argv: Sequence[str]) -> int:
    """Install the checkout, or without `--root` what the installed primus needs for training; gives the exit code.

    It tells `primus-cli` whether another Python may succeed.
    """
    parser = argparse.ArgumentParser()
    for name in ("root", "extras", "log", "base", "least"):
        parser.add_argument(f"--{name}", default="")
    given = parser.parse_args(argv)
    with open(given.log, "a", encoding="utf-8") as log:
        try:
            return Installation(given, log).run()
        except InstallError as stop:
            log.write(f"{stop}\n")
            print(f"primus-cli: {stop}", file=sys.stderr)
            return stop.code


class Installation:
    """One installation into the environment of the running interpreter.

    Steps: reuse a PyTorch that works on this machine, else choose a build and its source; install the packages; test
    PyTorch. A build that fails the test is removed again.
    """

    def __init__(self, given: argparse.Namespace, log: TextIO) -> None:
        self.root = Path(given.root) if given.root else None
        self.extras, self.base = given.extras.split(","), given.base
        self.log, self.log_path, self.least = log, given.log, given.least
        self.venv = Path(sys.prefix)
        self.wish = read_wish(self.venv)
        self.hardware = read_hardware(Path(os.environ.get("PRIMUS_MACHINE_ROOT") or "/"))
        self.config = packages.read_pip_config()
        self.pins = ((self.root or PACKAGE) / "constraints.txt").read_text(encoding="utf-8").splitlines()
        self.pin = next(line for line in self.pins if line.startswith("torch=="))[len("torch==") :].split()[0]

    def run(self) -> int:
        """Choose, install and verify."""
        # A shared PyTorch needs no choice. The choice comes before the installation, so that a machine without a
        # working build is reported before anything is downloaded.
        shared = self._share() if self.wish != "none" else []
        choice = None if shared or self.wish == "none" else self._choose()
        if choice:
            self._say_choice(choice)
        constraints = self.venv / "primus-constraints.txt"
        # Kept in the environment, where later calls of pip in it can use the same pins.
        constraints.write_text(
            "".join(f"{line}\n" for line in self._build_constraints(choice, shared)), encoding="utf-8"
        )
        extras = [extra for extra in self.extras if not (extra == "native" and self.wish == "none")]
        wanted = f"[{','.join(extras)}]"
        words = ["--constraint", str(constraints)]
        words += ["--editable", f".{wanted}"] if self.root else [f"primus{wanted}=={__version__}"]
        # uv ignores packages in shared folders, and would install PyTorch again.
        uv = None if shared and self.root else packages.find_uv()
        if not uv and importlib.util.find_spec("pip") is None:  # `uv tool install` makes environments without it
            packages.ensure_pip(self.log)
        self._say(f"installing the packages that primus needs with {'uv' if uv else 'pip'}: a few minutes at most")
        installed = packages.find_installed_version("torch")
        # Happens when $PRIMUS_TORCH has changed since the environment was installed.
        if choice and installed and installed != choice.version:
            packages.uninstall("torch", self.log)  # for pip, an installed 2.13.0+cpu satisfies the requirement 2.13.0
        code = packages.install(
            self.root or self.venv, words, choice.options if choice else (), self.config, uv, self.log
        )
        if code:
            return FAILED
        if self.wish != "none":
            self._verify()
        # Written last: it records only a choice whose PyTorch has been verified.
        (self.venv / WISH_FILE).write_text(f"{self.wish}\n", encoding="utf-8")
        return 0

    def _say(self, text: str) -> None:
        print(f"primus-cli: {text}", file=sys.stderr, flush=True)

    # Reuse an installed PyTorch

    def _share(self) -> list[str]:
        """Folders of the interpreter that the environment shares, because their PyTorch works on this machine."""
        site = Path(sysconfig.get_path("purelib"))
        # Decided by an earlier installation. The environment stays shared, so that an update does not download PyTorch.
        if (site / SHARED_FILE).is_file():
            return re.findall(r"addsitedir\('(.*?)'\)", (site / SHARED_FILE).read_text(encoding="utf-8"))
        own = sys.path if self.root is None else []
        # In a separate process: only the base interpreter knows its own sys.path.
        found, _ = packages.ask_python(self.base, LIST_PATH) if self.base else ({"path": own}, "")
        path = found.get("path")
        folders = [str(entry) for entry in path if str(entry).endswith("-packages")] if isinstance(path, list) else []
        build = torch_builds.find_installed_build(folders)
        if build is None:
            return []
        name = f"PyTorch {build.torch} (built for {build}) of {self.base or sys.prefix}"
        if torch_builds.parse_version(build.torch)[:2] < torch_builds.parse_version(self.least)[:2]:
            self._say(f"not using {name}: it is older than {self.least}")
            return []
        mismatch = self._find_mismatch(build)
        if mismatch:
            self._say(f"not using {name}: {mismatch}")
            return []
        self._say(f"using {name}")
        if self.root is None:
            return folders
        # A .pth file rather than --system-site-packages: only these folders are shared, and they come after the
        # environment's own packages.
        lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders)
        (site / SHARED_FILE).write_text(lines, encoding="utf-8")
        return folders

    def _find_mismatch(self, build: Build) -> str | None:
        if self.wish == "cpu":
            return None
        if self.wish != "auto" and torch_builds.name_index(build) != self.wish:
            return f"PRIMUS_TORCH={self.wish} asks for another build"
        return torch_builds.find_mismatch(build, self.hardware)

    # Choose a build

    def _choose(self) -> Choice:
        """Choose the build to install.

        Raises:
            InstallError: No working build is available.
        """
        wanted = self._list_candidate_builds()
        own = os.environ.get("PRIMUS_TORCH_INDEX")
        tried: list[str] = []
        if own:
            found = self._from_own_index(own, wanted, tried)
        else:
            # The user's configured sources first: a site with a mirror often has no route to pytorch.org.
            found = self._from_configured(wanted) or self._from_pytorch(PYTORCH_INDEX, wanted, tried)
            found = found or self._from_default(wanted, tried)
        if found:
            return found
        # Another Python cannot help if the index is unreachable, so `primus-cli` stops instead of trying one.
        is_out_of_reach = any("cannot be reached" in each or "offline" in each for each in tried)
        raise InstallError(self._explain_no_build(wanted, tried), STOPPED if is_out_of_reach else NO_BUILD)

    def _list_candidate_builds(self) -> list[Build]:
        if self.wish != "auto":
            return [build_of_wish(self.wish)]
        if self.hardware.vendor and not self.hardware.has_driver:
            raise InstallError(f"{self.hardware.name}: no driver is loaded for them\n{self._format_ways_out()}")
        wanted = torch_builds.choose_indexes(self.hardware)
        if not wanted:
            raise InstallError(f"no build of PyTorch works on {self.hardware.name}\n{self._format_ways_out()}")
        return wanted

    def _choose_best(self, versions: Sequence[str], wanted: Sequence[Build], *, is_pypi: bool = False) -> str | None:
        # An explicit wish overrides the detected hardware, for example in an image that is built on a machine without a
        # GPU.
        hardware = self.hardware if self.wish == "auto" else Hardware()
        return torch_builds.choose_version(versions, wanted, hardware, self.pin, self.least, is_pypi=is_pypi)

    def _from_own_index(self, own: str, wanted: Sequence[Build], tried: list[str]) -> Choice | None:
        """Choose from $PRIMUS_TORCH_INDEX: a folder of wheels, an index, or a parent of one index per kind of build."""
        folder = packages.find_folder(own)
        if folder is not None:
            if not folder.is_dir():
                raise InstallError(f"PRIMUS_TORCH_INDEX: the folder {folder} does not exist\n{self._format_ways_out()}")
            options = ("--find-links", str(folder.resolve()))
            version = self._choose_best(packages.list_versions(["--no-index", *options], self.log), wanted)
            tried.append(f"{folder} has none")
            return Choice(version, options, str(folder), _read_wheel_size(folder, version)) if version else None
        # A page /torch/ identifies a package index. Without it the URL is the parent of indexes such as /rocm7.2.
        page = packages.open_page(f"{own.rstrip('/')}/torch/", self.config)
        if page.status == 200:
            return self._from_index(own.rstrip("/"), page, wanted, tried, is_pypi=self.wish == "auto")
        return self._from_pytorch(own.rstrip("/"), wanted, tried)

    def _from_configured(self, wanted: Sequence[Build]) -> Choice | None:
        """Choose from the configured indexes of pip, if they have builds with a local version such as +rocm7.2."""
        if not self.config.has_sources:
            return None
        version = self._choose_best(packages.list_versions([], self.log), wanted)
        folders = [packages.find_folder(text) for text in self.config.get("find-links")]
        sizes = [_read_wheel_size(folder, version) for folder in folders if folder and version]
        return Choice(version, (), "where pip is configured to look", next(iter(sizes), None)) if version else None

    def _from_pytorch(self, base: str, wanted: Sequence[Build], tried: list[str]) -> Choice | None:
        """Choose from the indexes of PyTorch, one per kind of build: the first with the pinned version."""
        if sys.platform == "darwin" or self.config.is_offline:
            tried += ["pip is configured to be offline (no-index)"] if self.config.is_offline else []
            return None
        best: Choice | None = None
        for build in wanted:
            index = f"{base}/{torch_builds.name_index(build)}"
            page = packages.open_page(f"{index}/torch/", self.config)
            # Without a response from the host the other indexes there would time out as well.
            if not page.status:
                tried.append(f"{mask(index)} cannot be reached ({page.problem})")
                break
            found = None if page.status == 404 else self._from_index(index, page, [build], tried)
            if page.status == 404:
                tried.append(f"{mask(index)} is not there")
            # The first index with the pinned version wins. On ROCm the order of the indexes decides, because the build
            # has to match the installed ROCm.
            if found and (self.hardware.rocm or found.version.partition("+")[0] == self.pin):
                return found
            if found and (best is None or _parse_torch_version(found.version) > _parse_torch_version(best.version)):
                best = found
        return best

    def _from_index(
        self, index: str, page: Page, wanted: Sequence[Build], tried: list[str], *, is_pypi: bool = False
    ) -> Choice | None:
        version = self._choose_best(packages.list_versions(["--index-url", index], self.log), wanted, is_pypi=is_pypi)
        if version is None:
            tried.append(f"{mask(index)} has none")
            return None
        size = packages.find_size(page, index, version, self.config)
        return Choice(version, ("--extra-index-url", index), mask(index), size)

    def _from_default(self, wanted: Sequence[Build], tried: list[str]) -> Choice | None:
        """Choose from PyPI or its mirror, whose build for Linux supports a single version of CUDA."""
        if self.hardware.vendor and sysconfig.get_platform() != "linux-x86_64":
            return None
        versions = packages.list_versions([], self.log)
        version = self._choose_best(versions, wanted, is_pypi=True)
        if not versions:
            tried.append("the index of pip cannot be reached, or has none for this Python")
        elif version is None:
            tried.append("the index of pip has none")
        return Choice(version, (), "the index of pip") if version else None

    def _say_choice(self, choice: Choice) -> None:
        build = torch_builds.build_of_version(choice.version)
        kind = build.kind or ("cuda" if sys.platform == "linux" and self.hardware.vendor else "cpu")
        kind = "cuda" if not build.kind and sysconfig.get_platform() == "linux-x86_64" else kind
        about = self.hardware.name or "a machine without accelerator"
        size = f"{choice.size / 1e9:.2g} GB" if choice.size and choice.size > 5e7 else f"about {WHEEL_GB[kind]:g} GB"
        if choice.size and choice.size <= 5e7:
            size = f"{choice.size / 1e6:.2g} MB"
        if build.torch != self.pin:
            self._say(f"PyTorch {self.pin}, with which primus is tested, is not available; using {build.torch}")
        self._say(f"PyTorch {choice.version} for {about}, from {choice.source}")
        if packages.find_installed_version("torch") == choice.version:
            return
        self._say(f"downloading {size}, and about {LIBRARIES_GB[kind]:g} GB of its libraries (log: {self.log_path})")

    def _build_constraints(self, choice: Choice | None, shared: Sequence[str]) -> list[str]:
        """The pins, without those of shared packages, and with the chosen version of PyTorch."""
        left_out = packages.list_package_names(shared) if shared else set()
        if choice and torch_builds.build_of_version(choice.version).torch != self.pin:
            left_out |= set(PINNED_WITH_TORCH)
        lines = []
        for line in self.pins:
            name = packages.normalize(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0])
            if name == "torch" and choice:
                lines.append(f"torch=={choice.version}")
            elif name not in left_out:
                lines.append(line)
        return lines

    # Verification

    def _verify(self) -> None:
        """Import the installed PyTorch, and run an operation on each device.

        Raises:
            InstallError: It does not work on this machine.
        """
        # A separate process: a failing device library may abort the interpreter, and this one has no torch loaded.
        found, error = packages.ask_python(sys.executable, VERIFY)
        if not found:
            raise InstallError(f"the installed PyTorch does not work: {error}\n{self._format_ways_out()}")
        site = Path(sysconfig.get_path("purelib"))
        build = torch_builds.find_installed_build([str(site), *self._find_shared_folders(site)]) or Build("")
        mismatch = self._find_mismatch(build)
        problems = found.get("problems")
        reported = "; ".join(map(str, problems)) if isinstance(problems, list) else ""
        # A build without kernels for this GPU can never work. Other problems of a device may be temporary, and are
        # warnings.
        if mismatch or re.search("no kernel image|invalid device function", reported):
            what = f"PyTorch {found['version']} cannot work on {self.hardware.name}"
            raise InstallError(f"{what}: {mismatch or reported}\n{self._format_ways_out()}")
        if self.wish == "cpu" or not self.hardware.vendor:
            return
        if reported or not found["devices"]:
            reason = reported or "PyTorch sees no device: training will say why"
            self._say(f"warning: {self.hardware.name}: {reason}")
            return
        self._say(f"verified PyTorch {found['version']}: a sum on each of {found['devices']} devices")

    def _find_shared_folders(self, site: Path) -> list[str]:
        file = site / SHARED_FILE
        return re.findall(r"addsitedir\('(.*?)'\)", file.read_text(encoding="utf-8")) if file.is_file() else []

    def _explain_no_build(self, wanted: Sequence[Build], tried: Sequence[str]) -> str:
        names = " or ".join(dict.fromkeys(map(str, wanted)))
        python = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {sysconfig.get_platform()}"
        what = f"no PyTorch for {names} was found for {python} ({self.hardware.name or 'no accelerator'})"
        return "\n".join([what, *(f"  - {each}" for each in tried), self._format_ways_out()])

    def _format_ways_out(self) -> str:
        image = "nvcr.io/nvidia/pytorch:TAG" if self.hardware.vendor == "nvidia" else "rocm/primus:TAG"
        return (
            "  three ways out (docs/install.md):\n"
            f"  1. an image that has PyTorch: PRIMUS_TORCH=none ./primus-cli container --image {image} -- ...\n"
            "  2. an index or a folder of wheels that has it: PRIMUS_TORCH_INDEX=URL_OR_FOLDER ./primus-cli setup\n"
            "  3. the CPU only: PRIMUS_TORCH=cpu ./primus-cli setup, then train with --device cpu"
        )


def read_wish(venv: Path) -> str:
    """The requested kind of build: ``auto``, ``none``, or a name such as ``cpu``, ``cu126`` or ``rocm7.2``.

    Raises:
        InstallError: $PRIMUS_TORCH is none of these.
    """
    wish = os.environ.get("PRIMUS_TORCH", "")
    if not wish and (venv / WISH_FILE).is_file():
        wish = (venv / WISH_FILE).read_text(encoding="utf-8").strip()
    wish = wish or "auto"
    if wish not in ("auto", "none", "cpu"):
        build_of_wish(wish)
    return wish


def build_of_wish(wish: str) -> Build:
    """The build that ``cu126`` or ``rocm7.2`` names.

    Raises:
        InstallError: `wish` names none.
    """
    build = torch_builds.build_of_version(f"0+{wish}")
    if not build.kind:
        raise InstallError(f"PRIMUS_TORCH={wish}: use auto, cpu, none, or a build such as cu126 or rocm7.2", 2)
    return build._replace(torch="")


def _parse_torch_version(version: str) -> tuple[int, ...]:
    return torch_builds.parse_version(version.partition("+")[0])


def _read_wheel_size(folder: Path, version: str | None) -> int | None:
    return next((file.stat().st_size for file in folder.glob(f"torch-{version}-*.whl")), None)
