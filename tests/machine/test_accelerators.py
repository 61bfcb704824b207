"""A machine with accelerators that PyTorch cannot use is refused with the reason, and never trained on its CPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import cli
from fakes.users import as_another_user
from machines.tree import HERE, grow
from primus.errors import UnfitError
from primus.machine.accelerators import check_launch, choose_device_type, find_accelerators
from primus.machine.facts import MachineFacts
from primus.machine.probe import probe

EXAMPLE = Path(__file__).parents[2] / "examples/quickstart.yaml"


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    """The root of a machine with 8 MI300X whose devices may be opened."""
    root = Path(shutil.copytree(HERE / "mi300x-8", tmp_path / "amd", symlinks=True))
    (root / "dev/dri").mkdir(parents=True)
    for name in ("kfd", *(f"dri/renderD{128 + index}" for index in range(8))):
        (root / "dev" / name).touch()
    return root


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    """The root of a machine with 8 H100 and a driver of branch 570."""
    root = grow("h100-8", tmp_path / "nvidia")
    (root / "dev").mkdir()
    for name in ("nvidiactl", *(f"nvidia{index}" for index in range(8))):
        (root / "dev" / name).touch()
    (root / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    )
    return root


@pytest.fixture
def install_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Puts a PyTorch first on sys.path that is only its version file, as the check reads it."""

    def install(version: str, cuda: str | None = None, hip: str | None = None) -> None:
        folder = tmp_path / "site" / "torch"
        folder.mkdir(parents=True, exist_ok=True)
        text = f"from typing import Optional\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n"
        (folder / "version.py").write_text(text + f"hip: Optional[str] = {hip!r}\n")

    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return install  # type: ignore[return-value]


def refused(root: Path, **environ: str) -> str:
    environ = {"PRIMUS_MACHINE_ROOT": str(root), **environ}
    with pytest.raises(UnfitError) as raised:
        check_launch("auto", probe(root, environ), environ)
    assert raised.value.exit_code == 3
    assert "--device cpu" in raised.value.hint
    return str(raised.value)


def accepted(root: Path, **environ: str) -> None:
    environ = {"PRIMUS_MACHINE_ROOT": str(root), **environ}
    check_launch("auto", probe(root, environ), environ)


def test_the_pytorch_of_the_workers_counts_not_that_of_the_launcher(amd: Path, tmp_path: Path, install_torch) -> None:
    install_torch("2.13.0+cpu")
    assert "the CPU" in refused(amd)
    folder = tmp_path / "environment/torch"
    folder.mkdir(parents=True)
    (folder / "version.py").write_text("__version__ = '2.13.0+rocm7.2'\ncuda = None\nhip = '7.2.5321'\n")
    environ = {"PRIMUS_MACHINE_ROOT": str(amd)}
    check_launch("auto", probe(amd, environ), environ, [str(folder.parent)])


def test_a_cuda_build_on_amd_devices_is_refused(amd: Path, install_torch) -> None:
    install_torch("2.13.0+cu130", cuda="13.0")
    told = refused(amd)
    assert "8 x MI300X present: PyTorch 2.13.0 (built for CUDA 13.0) cannot use them" in told
    assert "drives no devices of AMD" in told and "./primus-cli setup" in told


def test_a_rocm_build_on_nvidia_devices_is_refused(nvidia: Path, install_torch) -> None:
    install_torch("2.13.0+rocm7.2", hip="7.2.53211")
    assert "8 x H100" in refused(nvidia) and "drives no devices of NVIDIA" in refused(nvidia)


def test_a_cpu_build_on_a_gpu_machine_is_refused(amd: Path, nvidia: Path, install_torch) -> None:
    install_torch("2.13.0+cpu")
    for root in (amd, nvidia):
        assert "the build is for CPUs only" in refused(root)


def test_a_build_for_a_newer_cuda_major_than_the_driver_is_refused_and_a_newer_minor_is_not(
    nvidia: Path, install_torch
) -> None:
    install_torch("2.13.0", cuda="13.0")
    assert "driver 570.86.15 runs CUDA 12.x, the build is for CUDA 13.x and needs driver 580" in refused(nvidia)
    compat = nvidia / "usr/local/cuda-13.0/compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.580.65.06").touch()
    accepted(nvidia)  # by the package of NVIDIA's that is made for this
    shutil.rmtree(compat)
    install_torch("2.8.0", cuda="12.9")
    accepted(nvidia)


def test_the_build_for_the_devices_is_accepted(amd: Path, nvidia: Path, install_torch) -> None:
    install_torch("2.13.0+cu126", cuda="12.6")
    accepted(nvidia)
    install_torch("2.13.0+rocm7.2", hip="7.2.53211")
    accepted(amd)


def test_an_empty_visibility_variable_is_named(amd: Path, nvidia: Path, install_torch) -> None:
    install_torch("2.13.0+rocm7.2", hip="7.2.53211")
    assert "HIP_VISIBLE_DEVICES='' selects no device" in refused(amd, HIP_VISIBLE_DEVICES="")
    accepted(amd, HIP_VISIBLE_DEVICES="3")
    install_torch("2.13.0+cu126", cuda="12.6")
    assert "CUDA_VISIBLE_DEVICES='-1' selects no device" in refused(nvidia, CUDA_VISIBLE_DEVICES="-1")


def test_a_container_without_its_devices_is_told_the_option_that_it_lacks(
    amd: Path, nvidia: Path, install_torch
) -> None:
    for root in (amd, nvidia):
        (root / ".dockerenv").touch()
    (amd / "dev/kfd").unlink()
    for node in (nvidia / "dev").glob("nvidia*"):
        node.unlink()
    install_torch("2.13.0+rocm7.2", hip="7.2.53211")
    assert "/dev/kfd does not exist; start the container with --device /dev/kfd" in refused(amd)
    (amd / "dev/kfd").touch()
    for node in (amd / "dev/dri").iterdir():
        node.unlink()
    assert "/dev/dri/renderD* does not exist; start the container with --device" in refused(amd)
    install_torch("2.13.0+cu126", cuda="12.6")
    assert "--gpus all" in refused(nvidia)
    (nvidia / ".dockerenv").unlink()
    accepted(nvidia)  # the first process that needs the nodes makes them


@pytest.mark.parametrize("blocked", ["kfd", "dri/renderD128"])
def test_a_user_without_the_right_to_open_the_devices_is_told_the_group(
    blocked: str, amd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="primus-test-") as shared:
        Path(shared).chmod(0o755)
        root = Path(shutil.copytree(amd, Path(shared, "amd"), symlinks=True))
        site = Path(shared, "site/torch")
        site.mkdir(parents=True)
        (site / "version.py").write_text("__version__ = '2.13.0+rocm7.2'\ncuda = None\nhip = '7.2.1'\n")
        monkeypatch.syspath_prepend(str(site.parent))
        nodes = [root / "dev/kfd", *(root / "dev/dri").iterdir()]
        for node in nodes:
            node.chmod(0 if (node.name == "kfd") == (blocked == "kfd") else 0o666)
        with as_another_user():
            told = refused(root)
        assert f"no permission to open /dev/{blocked}" in told and "usermod -aG" in told
        for node in nodes:
            node.chmod(0o666)
        with as_another_user():
            accepted(root)


def test_devices_without_a_driver_are_refused(amd: Path, install_torch) -> None:
    install_torch("2.13.0+rocm7.2", hip="7.2.53211")
    shutil.rmtree(amd / "sys/class/kfd")
    assert "8 x MI300X present" in refused(amd) and "no driver lists them" in refused(amd)


def test_graphics_that_no_build_has_code_for_is_not_an_accelerator(amd: Path) -> None:
    for number in range(2, 20):
        folder = amd / f"sys/class/kfd/kfd/topology/nodes/{number}"
        if number > 2 and folder.exists():
            shutil.rmtree(folder)
    shutil.rmtree(amd / "sys/bus/pci")
    file = amd / "sys/class/kfd/kfd/topology/nodes/2/properties"
    lines = [
        line for line in file.read_text().splitlines() if line.split()[0] not in ("device_id", "gfx_target_version")
    ]
    file.write_text("\n".join([*lines, "device_id 5567", "gfx_target_version 110003"]) + "\n")
    facts = probe(amd, {})
    assert [device.model for device in facts.devices] == [None]
    assert find_accelerators(facts) == ()


def test_a_worker_whose_pytorch_sees_nothing_gives_every_reason_it_finds(amd: Path, install_torch) -> None:
    environ = {"PRIMUS_MACHINE_ROOT": str(amd), "ROCR_VISIBLE_DEVICES": "9"}
    install_torch("2.13.0+cu130", cuda="13.0")
    with pytest.raises(UnfitError) as raised:
        choose_device_type("auto", 0, environ, "HIP error")
    assert "drives no devices of AMD; ROCR_VISIBLE_DEVICES='9' selects no device" in str(raised.value)
    install_torch("2.13.0+rocm7.2", hip="7.2.53211")
    with pytest.raises(UnfitError, match="PyTorch says: HIP error"):
        choose_device_type("auto", 0, {"PRIMUS_MACHINE_ROOT": str(amd)}, "HIP error")
    assert choose_device_type("auto", 8, environ) == "cuda"
    assert choose_device_type("cpu", 8, environ) == "cpu"


def test_a_machine_without_accelerators_trains_on_its_cpu_unless_a_device_is_demanded(tmp_path: Path) -> None:
    environ = {"PRIMUS_MACHINE_ROOT": str(tmp_path)}
    check_launch("auto", MachineFacts(), environ)
    assert choose_device_type("auto", 0, environ) == "cpu"
    for refuse in (
        lambda: check_launch("cuda", MachineFacts(), environ),
        lambda: choose_device_type("cuda", 0, environ),
    ):
        with pytest.raises(UnfitError, match="no AMD or NVIDIA accelerator"):
            refuse()


TRAIN = ("train", "pretrain", "--config", str(EXAMPLE), "--train_iters", "1", "--sample_tokens", "0",
         "--seq_length", "16", "--micro_batch_size", "1", "--num_layers", "1")  # fmt: skip


@pytest.mark.native
def test_training_on_a_gpu_node_whose_pytorch_is_for_cpus_ends_with_3_in_the_dry_run_too(
    amd: Path, tmp_path: Path
) -> None:
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("this PyTorch is not a build for CPUs")
    env = {"PRIMUS_MACHINE_ROOT": str(amd)}
    for words in (("direct", "--", *TRAIN), ("--dry-run", "direct", "--", *TRAIN)):
        done = cli.run(*words, cwd=tmp_path, **env)
        assert done.returncode == 3, done.stderr
        assert "8 x MI300X present" in done.stderr and "--device cpu" in done.stderr
    assert not (tmp_path / "output").exists()


@pytest.mark.native
@pytest.mark.slow
def test_device_cpu_trains_one_process_on_the_cpu_of_a_gpu_node(amd: Path, tmp_path: Path) -> None:
    env = {"PRIMUS_MACHINE_ROOT": str(amd)}
    dry = cli.run("--dry-run", "direct", "--", *TRAIN, "--device", "cpu", cwd=tmp_path, **env)
    assert dry.returncode == 0 and "nproc: 1" in dry.stdout and "HSA_" not in dry.stdout
    done = cli.run("direct", "--", *TRAIN, "--device", "cpu", cwd=tmp_path, timeout_s=200, **env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.native
def test_measuring_a_gpu_node_reports_no_figures_of_its_cpu(amd: Path, tmp_path: Path) -> None:
    words = ("direct", "--nproc", "1", "--", "preflight", "--perf", "--quick", "--tests", "sanity")
    done = cli.run(*words, cwd=tmp_path, timeout_s=120, PRIMUS_MACHINE_ROOT=str(amd))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "8 x MI300X present" in done.stdout + done.stderr
