"""The build of PyTorch that fits the hardware is installed by real pip and uv from local indexes, or none is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.torch_wheels import make_index, make_wheel, served
from machines.tree import HERE, grow

pytestmark = pytest.mark.slow  # each test starts pip several times

REPOSITORY = Path(__file__).parents[2]
CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from primus.bootstrap.install import main; sys.exit(main(sys.argv[1:]))"
)
NOWHERE = "http://127.0.0.1:9"
"""The discard port: nothing listens there."""

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "small"
version = "1.0"
optional-dependencies = { native = ["torch>=2.6"], data = [] }
"""

BACKEND = '''\
"""Builds the checkout without setuptools, so that nothing is downloaded (PEP 660)."""
import zipfile

TAG = "Tag: py3-none-any\\n"

def build_editable(folder, settings=None, metadata=None):
    name = "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        info = "small-1.0.dist-info"
        meta = ["Metadata-Version: 2.1", "Name: small", "Version: 1.0", "Provides-Extra: native"]
        meta += ["Provides-Extra: data", 'Requires-Dist: torch>=2.6; extra == "native"']
        wheel.writestr(f"{info}/METADATA", "\\n".join(meta) + "\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\n" + TAG)
        wheel.writestr(f"{info}/RECORD", "")
    return name

build_wheel = build_editable
'''

INDEXES = {
    "cpu": ("2.12.0+cpu", "2.13.0+cpu", "2.14.0+cpu"),
    "cu126": ("2.12.0+cu126", "2.13.0+cu126"),
    "cu128": ("2.10.0+cu128", "2.11.0+cu128"),
    "cu130": ("2.13.0+cu130@manylinux_2_17_x86_64", "2.13.0+cu130@manylinux_2_17_aarch64"),
    "cu132": ("2.13.0+cu132", "2.14.0+cu132"),
    "rocm7_0": ("2.9.0+rocm7.0@manylinux_2_17_x86_64", "2.10.0+rocm7.0@manylinux_2_17_x86_64"),
    "rocm7_2": ("2.12.0+rocm7.2@manylinux_2_17_x86_64", "2.13.0+rocm7.2@manylinux_2_17_x86_64"),
}


class Machine:
    """An environment with pip, the files of some hardware, and the variables of a user."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self.root, self.prefix = folder / "hardware", environment
        self.root.mkdir()
        self.checkout = folder / "a checkout"
        self.checkout.mkdir()
        (self.checkout / "pyproject.toml").write_text(PYPROJECT)
        (self.checkout / "backend.py").write_text(BACKEND)
        (self.checkout / "constraints.txt").write_text("torch==2.13.0\nsympy==1.14.0\n")
        self.log = folder / "log"
        self.env = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
        self.env |= {"PRIMUS_MACHINE_ROOT": str(self.root), "PIP_CACHE_DIR": str(folder / "cache"), "UV_NO_CACHE": "1"}
        # What is not on this machine cannot be reached, and that at once.
        self.env |= {"http_proxy": NOWHERE, "https_proxy": NOWHERE, "no_proxy": "127.0.0.1", "PIP_RETRIES": "0"}

    def add_nvidia(self, driver: str, device_id: str = "0x2330") -> None:
        grow("h100-8", self.root)
        (self.root / "proc/driver/nvidia/version").write_text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (dvs-builder)\n"
        )
        for file in self.root.glob("sys/bus/pci/devices/*/device"):
            file.write_text(f"{device_id}\n")

    def add_amd(self, rocm: str | None) -> None:
        shutil.copytree(HERE / "mi300x-8/sys", self.root / "sys", symlinks=True)
        if rocm:
            (self.root / "opt/rocm/.info").mkdir(parents=True)
            (self.root / "opt/rocm/.info/version").write_text(f"{rocm}\n")

    def use_uv(self) -> None:
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if uv is None:
            pytest.skip("uv is not installed")
        (self.checkout.parent / "bin").mkdir()
        (self.checkout.parent / "bin/uv").symlink_to(uv)
        self.env["PATH"] = f"{self.checkout.parent}/bin:{self.env['PATH']}"

    def install(self, **env: str) -> subprocess.CompletedProcess[str]:
        words = ["--root", str(self.checkout), "--extras", "native,data", "--log", str(self.log), "--least", "2.6"]
        command = [str(self.prefix / "bin/python"), "-c", CODE, str(REPOSITORY / "src"), *words]
        return subprocess.run(command, env=self.env | env, cwd="/", capture_output=True, text=True, timeout=120)

    def installed(self, **env: str) -> str:
        done = self.install(**env)
        assert done.returncode == 0, done.stderr + self.log.read_text()
        self.said = done.stderr
        code = "import torch; print(torch.__version__)"
        return subprocess.run([self.prefix / "bin/python", "-c", code], capture_output=True, text=True).stdout.strip()

    def stopped(self, code: int = 3, **env: str) -> str:
        done = self.install(**env)
        assert done.returncode == code, done.stderr + self.log.read_text()
        assert "three ways out" in done.stderr and "PRIMUS_TORCH=cpu" in done.stderr
        assert "$ " not in done.stderr and "pip install" not in self.log.read_text()
        return done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One environment with pip for all tests: what they install replaces what was there."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True, with_pip=True)
    return folder


@pytest.fixture
def machine(tmp_path: Path, environment: Path) -> Machine:
    for file in environment.glob("primus-*"):
        file.unlink()
    for folder in environment.glob("lib/python3*/site-packages/torch*"):
        shutil.rmtree(folder)
    return Machine(tmp_path, environment)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Indexes like those of PyTorch."""
    with served(make_index(tmp_path_factory.mktemp("index") / "whl", **INDEXES)) as url:
        yield url


def test_an_amd_machine_gets_the_build_for_its_rocm_which_is_tried_on_each_device(machine: Machine, index: str) -> None:
    machine.add_amd("7.2.0-43")
    version = machine.installed(PRIMUS_TORCH_INDEX=index, FAKE_DEVICES="8")
    assert version == "2.13.0+rocm7.2"
    assert "PyTorch 2.13.0+rocm7.2 for 8 x gfx942, ROCm 7.2, from " + index in machine.said
    assert "downloading" in machine.said and "a sum on each of 8 devices" in machine.said


def test_where_the_index_for_its_rocm_lacks_the_pinned_version_the_newest_one_is_taken_and_that_is_said(
    machine: Machine, index: str
) -> None:
    machine.add_amd("7.0.1-42")
    assert machine.installed(PRIMUS_TORCH_INDEX=index, FAKE_DEVICES="8") == "2.10.0+rocm7.0"
    assert "PyTorch 2.13.0, with which primus is tested, is not available; using 2.10.0" in machine.said
    assert "sympy" not in (machine.prefix / "primus-constraints.txt").read_text()


def test_without_an_installed_rocm_the_pinned_version_decides(machine: Machine, index: str) -> None:
    machine.add_amd(None)
    assert machine.installed(PRIMUS_TORCH_INDEX=index, FAKE_DEVICES="8") == "2.13.0+rocm7.2"


@pytest.mark.parametrize(
    ("driver", "version"),
    [("535.183.01", "2.13.0+cu126"), ("570.86.15", "2.13.0+cu126"), ("580.65.06", "2.13.0+cu130")],
)
def test_an_nvidia_machine_gets_the_build_that_its_driver_branch_runs(
    driver: str, version: str, machine: Machine, index: str
) -> None:
    machine.add_nvidia(driver)
    assert machine.installed(PRIMUS_TORCH_INDEX=index, FAKE_DEVICES="8") == version
    assert f"8 x NVIDIA GPU, driver {driver}" in machine.said


def test_a_blackwell_device_gets_no_build_without_code_for_it(machine: Machine, index: str) -> None:
    machine.add_nvidia("570.86.15", device_id="0x2901")
    assert machine.installed(PRIMUS_TORCH_INDEX=index, FAKE_DEVICES="8") == "2.11.0+cu128"


def test_a_machine_without_accelerator_gets_the_small_build_for_cpus(machine: Machine, index: str) -> None:
    assert machine.installed(PRIMUS_TORCH_INDEX=index) == "2.13.0+cpu"
    assert "for a machine without accelerator" in machine.said and "downloading" in machine.said
    assert machine.installed(PRIMUS_TORCH_INDEX=index) == "2.13.0+cpu"
    assert "downloading" not in machine.said


def test_an_aarch64_machine_gets_a_build_for_it_or_is_told_that_there_is_none(machine: Machine, index: str) -> None:
    aarch64 = {"_PYTHON_HOST_PLATFORM": "linux-aarch64", "PRIMUS_TORCH_INDEX": index}
    machine.add_nvidia("580.65.06")
    assert machine.installed(**aarch64, FAKE_DEVICES="8") == "2.13.0+cu130"
    shutil.rmtree(machine.root)
    machine.root.mkdir()
    machine.add_amd("7.2.0")
    machine.log.unlink()
    told = machine.stopped(code=4, **aarch64)
    assert "no PyTorch for ROCm 7.2" in told and "on linux-aarch64 (8 x gfx942" in told


def test_uv_installs_where_it_is_there(machine: Machine, index: str) -> None:
    machine.use_uv()
    machine.add_amd("7.2.0")
    machine.env["PIP_INDEX_URL"] = f"{index}/cpu"  # uv does not know pip's settings of its own accord
    assert machine.installed(PRIMUS_TORCH_INDEX=index, FAKE_DEVICES="8") == "2.13.0+rocm7.2"
    assert "with uv" in machine.said and "uv pip install" in machine.log.read_text()
    assert "with pip" in machine.install(PRIMUS_TORCH_INDEX=index, PRIMUS_INSTALLER="pip", FAKE_DEVICES="8").stderr


def test_no_index_ends_within_seconds_with_three_ways_out_and_nothing_installed(machine: Machine) -> None:
    machine.add_amd("7.2.0")
    told = machine.stopped(PRIMUS_TORCH_INDEX=f"{NOWHERE}/whl", no_proxy="127.0.0.1,localhost")
    assert "no PyTorch for ROCm 7.2" in told and f"{NOWHERE}/whl/rocm7.2 cannot be reached" in told
    assert "download.pytorch.org/whl/rocm7.2 cannot be reached" in machine.stopped()


@pytest.mark.parametrize("with_uv", [False, True], ids=["pip", "uv"])
def test_offline_a_folder_of_wheels_is_enough(with_uv: bool, machine: Machine, tmp_path: Path) -> None:
    if with_uv:
        machine.use_uv()
    for version in ("2.13.0+rocm7.2", "2.13.0+cpu"):
        make_wheel(tmp_path / "wheels", version)
    machine.add_amd("7.2.0")
    folder = str(tmp_path / "wheels")
    assert machine.installed(PIP_NO_INDEX="1", PIP_FIND_LINKS=folder, FAKE_DEVICES="8") == "2.13.0+rocm7.2"
    assert machine.installed(PIP_NO_INDEX="1", PRIMUS_TORCH_INDEX=folder, FAKE_DEVICES="8") == "2.13.0+rocm7.2"
    assert machine.installed(PIP_NO_INDEX="1", PIP_FIND_LINKS=folder, PRIMUS_TORCH="cpu") == "2.13.0+cpu"


def test_behind_a_mirror_a_build_whose_version_does_not_tell_is_taken_only_where_it_works(
    machine: Machine, tmp_path: Path
) -> None:
    with served(make_index(tmp_path / "simple", mirror=("2.12.0", "2.13.0"))) as url:
        mirror = {"PIP_INDEX_URL": f"{url}/mirror"}
        assert machine.installed(**mirror) == "2.13.0"  # any build works on a CPU
        machine.add_nvidia("580.65.06")
        assert machine.installed(**mirror, FAKE_DEVICES="8") == "2.13.0"
        machine.add_nvidia("570.86.15")
        machine.log.unlink()
        machine.stopped(**mirror)
        shutil.rmtree(machine.root)
        machine.root.mkdir()
        machine.add_amd("7.2.0")
        assert "the index of pip has none" in machine.stopped(**mirror)


def test_a_mirror_with_builds_for_the_hardware_is_enough_and_its_password_is_not_shown(
    machine: Machine, tmp_path: Path
) -> None:
    machine.add_amd("7.2.0")
    with served(make_index(tmp_path / "simple", mirror=("2.13.0", "2.13.0+rocm7.2"))) as url:
        secret = url.replace("://", "://user:canary@")
        assert machine.installed(PIP_INDEX_URL=f"{secret}/mirror", FAKE_DEVICES="8") == "2.13.0+rocm7.2"
        own = machine.installed(PRIMUS_TORCH_INDEX=f"{secret}/mirror", FAKE_DEVICES="8")
    assert own == "2.13.0+rocm7.2"
    assert "canary" not in machine.said + machine.log.read_text()


def test_a_build_that_is_not_what_its_version_says_is_found_out(machine: Machine, tmp_path: Path, index: str) -> None:
    wheel = make_wheel(tmp_path / "wheels", "2.13.0+cpu")
    wheel.rename(tmp_path / "wheels" / wheel.name.replace("+cpu", "+rocm7.2"))
    machine.add_amd("7.2.0")
    done = machine.install(PRIMUS_TORCH_INDEX=str(tmp_path / "wheels"), FAKE_DEVICES="8")
    assert done.returncode != 0
    error = {"FAKE_DEVICES": "8", "FAKE_DEVICE_ERROR": "HIP error: invalid device function"}
    done = machine.install(PRIMUS_TORCH_INDEX=index, **error)
    assert done.returncode == 3 and "cannot work on 8 x gfx942" in done.stderr and "three ways out" in done.stderr


def test_devices_that_pytorch_does_not_see_are_a_warning_since_training_refuses_them(
    machine: Machine, index: str
) -> None:
    machine.add_amd("7.2.0")
    assert machine.installed(PRIMUS_TORCH_INDEX=index) == "2.13.0+rocm7.2"
    assert "warning: 8 x gfx942, ROCm 7.2: PyTorch sees no device" in machine.said


def test_devices_without_a_driver_stop_the_installation(machine: Machine, index: str) -> None:
    machine.add_amd("7.2.0")
    shutil.rmtree(machine.root / "sys/class/kfd")
    assert "no driver is loaded" in machine.stopped(PRIMUS_TORCH_INDEX=index)


def test_the_user_can_choose_the_build_or_none_and_an_update_remembers_it(machine: Machine, index: str) -> None:
    machine.add_amd("7.2.0")
    assert machine.installed(PRIMUS_TORCH_INDEX=index, PRIMUS_TORCH="cpu") == "2.13.0+cpu"
    assert machine.installed(PRIMUS_TORCH_INDEX=index) == "2.13.0+cpu"
    assert machine.installed(PRIMUS_TORCH_INDEX=index, PRIMUS_TORCH="rocm7.0") == "2.10.0+rocm7.0"
    assert machine.install(PRIMUS_TORCH="none").returncode == 0
    wrong = machine.install(PRIMUS_TORCH="cuda")
    assert wrong.returncode == 2 and "such as cu126 or rocm7.2" in wrong.stderr
