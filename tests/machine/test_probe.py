"""The kernel's files come first, tools fill what they leave open, and where both speak they are compared."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fakes.tools import tool
from machines.tree import HERE, grow
from primus.errors import UsageError
from primus.machine.environment.precedence import GivenVariables, JobNode, build_environment
from primus.machine.facts import MachineFacts
from primus.machine.network.selection import Network
from primus.machine.probe import probe
from primus.machine.tools import smi

NODES = "sys/class/kfd/kfd/topology/nodes"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A copy of the MI300X machine that a test may change."""
    return Path(shutil.copytree(HERE / "mi300x-8/sys", tmp_path / "root/sys", symlinks=True)).parent


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch takes seconds; its answer is tested with the other tools' outputs."""
    for vendor, sources in list(smi.SOURCES.items()):
        monkeypatch.setitem(smi.SOURCES, vendor, tuple(source for source in sources if source.tool != "torch"))


def tools(folder: Path, **answers: str) -> dict[str, str]:
    """An environment whose PATH has these tools only; an answer is the body of a shell script."""
    return [tool(folder, name.replace("_", "-"), body) for name, body in answers.items()][-1]


def amd_smi(name: str = "AMD Instinct MI300X OAM", mebibytes: object = 196592, device_id: str = "0x74a1") -> str:
    """An amd-smi that knows eight cards at the addresses of the MI300X machine."""
    buses = ["05", "27", "47", "65", "85", "a7", "c7", "e5"]
    listed = ",".join(f'{{"gpu":{i},"bdf":"0000:{bus}:00.0"}}' for i, bus in enumerate(buses))
    size = f'{{"value":{mebibytes},"unit":"MB"}}'
    static = ",".join(
        f'{{"gpu":{i},"asic":{{"market_name":"{name}","device_id":"{device_id}"}},"vram":{{"size":{size}}}}}'
        for i in range(8)
    )
    return f"case $1 in list) echo '[{listed}]';; static) echo '{{\"gpu_data\":[{static}]}}';; esac"


def told(facts: MachineFacts) -> str:
    return "\n".join(f"{problem.where}: {problem.problem}" for problem in facts.problems)


def test_a_recorded_machine_is_asked_nothing(machine: Path, tmp_path: Path) -> None:
    environ = tools(tmp_path / "bin", amd_smi=f"echo asked > {tmp_path}/asked")
    shutil.rmtree(machine / NODES / "2/mem_banks")
    assert len(probe(machine, environ).devices) == 8
    assert not (tmp_path / "asked").exists()


def test_tools_are_asked_only_for_what_is_missing(machine: Path, tmp_path: Path) -> None:
    environ = tools(tmp_path / "bin", amd_smi=f"echo asked >> {tmp_path}/asked; {amd_smi()}")
    probe(machine, environ, tools="missing")
    assert not (tmp_path / "asked").exists()
    shutil.rmtree(machine / NODES / "3/mem_banks")
    (machine / "sys/bus/pci/devices/0000:27:00.0/mem_info_vram_total").unlink()
    device = probe(machine, environ, tools="missing").devices[1]
    assert (tmp_path / "asked").exists()
    assert (device.memory_bytes, device.sources["memory_bytes"]) == (196592 << 20, "amd-smi")
    assert device.sources["compute_units"] == "kfd"


def test_sources_that_disagree_are_both_shown_and_the_earlier_wins(machine: Path, tmp_path: Path) -> None:
    environ = tools(tmp_path / "bin", amd_smi=amd_smi(mebibytes=98304, device_id="0x74a5"))
    facts = probe(machine, environ, tools="all")
    assert facts.model == "MI300X" and facts.devices[0].memory_bytes == 206141652992
    assert "GPU 0: memory_bytes is 206141652992 by kfd, 103079215104 by amd-smi" in told(facts)
    assert "GPU 7: device_id is 29857 by kfd, 29861 by amd-smi" in told(facts)


def test_a_difference_of_a_hundredth_is_none(machine: Path, tmp_path: Path) -> None:
    facts = probe(machine, tools(tmp_path / "bin", amd_smi=amd_smi(mebibytes=195592)), tools="all")
    assert "memory_bytes" not in told(facts)
    assert facts.devices[0].name == "AMD Instinct MI300X OAM"


def test_cards_that_the_kernel_or_a_tool_alone_knows_are_told(machine: Path, tmp_path: Path) -> None:
    shutil.rmtree(machine / NODES / "9")
    shutil.rmtree(machine / "sys/bus")
    environ = tools(tmp_path / "bin", amd_smi=amd_smi().replace("0000:05:00.0", "0000:06:00.0"))
    facts = probe(machine, environ, tools="all")
    assert "amd-smi: does not list the GPUs at 0000:05:00" in told(facts)
    assert "amd-smi: is the only source that lists the GPUs at 0000:06:00, 0000:e5:00" in told(facts)


def test_a_name_does_not_decide_the_model_of_a_known_id(machine: Path, tmp_path: Path) -> None:
    environ = tools(tmp_path / "bin", amd_smi=amd_smi(name="AMD Instinct MI325X"))
    assert probe(machine, environ, tools="all").model == "MI300X"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo '{\"gpu_data\": ['", "its output cannot be parsed"),
        ("echo 'no ROCm device' >&2; exit 2", "no ROCm device"),
        (amd_smi(mebibytes='"N/A"'), ""),
    ],
)
def test_a_tool_that_says_nothing_useful_changes_nothing(machine: Path, tmp_path: Path, body: str, said: str) -> None:
    facts = probe(machine, tools(tmp_path / "bin", amd_smi=body), tools="all")
    assert facts.model == "MI300X" and facts.devices[0].memory_bytes == 206141652992
    assert said in told(facts)


def test_a_tool_that_hangs_is_told_once_and_the_next_is_asked(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smi, "LIMIT_S", 0.3)
    hanging = "sleep 60 & wait"
    rocm_smi = 'echo \'{"card0": {"PCI Bus": "0000:05:00.0", "Card Series": "AMD Instinct MI300X"}}\''
    began = time.monotonic()
    facts = probe(machine, tools(tmp_path / "bin", amd_smi=hanging, rocm_smi=rocm_smi), tools="all")
    assert time.monotonic() - began < 15
    assert told(facts).count("amd-smi static --json: amd-smi gave no response in 0.3 s") == 1
    assert facts.devices[0].name == "AMD Instinct MI300X"


def test_devices_that_only_a_tool_knows_are_taken(tmp_path: Path) -> None:
    environ = tools(tmp_path / "bin", nvidia_smi="echo '0, NVIDIA H200, 00000000:0A:00.0, 143771 MiB, 580.65.06'")
    facts = probe(tmp_path, environ, tools="missing")
    (device,) = facts.devices
    assert (device.vendor, device.model, device.memory_bytes) == ("nvidia", "H200", 143771 << 20)
    assert (device.sources["model"], len(facts.partitions)) == ("nvidia-smi", 1)
    assert "nvidia-smi: lists devices that the kernel's files do not" in told(facts)


def test_nvidias_memory_comes_from_its_tool_where_the_files_have_none(tmp_path: Path) -> None:
    root = grow("h100-8", tmp_path / "root")
    buses = ["1B", "43", "52", "61", "9D", "C3", "D1", "DF"]
    rows = "\n".join(f"{i}, NVIDIA H100, 00000000:{bus}:00.0, 81559 MiB, 580.65.06" for i, bus in enumerate(buses))
    facts = probe(root, tools(tmp_path / "bin", nvidia_smi=f"echo '{rows}'"), tools="missing")
    assert {device.memory_bytes for device in facts.devices} == {81559 << 20}
    assert {part.memory_bytes for part in facts.partitions} == {81559 << 20}
    assert facts.software.nvidia_driver == "580.65.06"


def test_the_processors_graphics_are_no_device_beside_nvidias(tmp_path: Path) -> None:
    root = grow("h100-8", tmp_path)
    node = root / NODES / "1"
    node.mkdir(parents=True)
    (node / "properties").write_text("simd_count 8\nsimd_per_cu 2\ndevice_id 5056\nlocation_id 3072\nunique_id 0\n")
    facts = probe(root)
    assert facts.model == "H100" and len(facts.devices) == 8
    assert "ignored: this machine uses its NVIDIA GPUs" in told(facts)


def test_a_login_node_without_devices_is_asked_nothing(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices/0000:00:00.0").mkdir(parents=True)
    environ = tools(tmp_path / "bin", amd_smi=f"echo asked > {tmp_path}/asked; echo no device >&2; exit 1")
    assert probe(tmp_path, environ, tools="missing").devices == ()
    assert not (tmp_path / "asked").exists()


def test_the_user_names_the_model(machine: Path) -> None:
    facts = probe(machine, {"PRIMUS_GPU_MODEL": "mi325x"})
    assert facts.model == "MI325X" and {device.sources["model"] for device in facts.devices} == {"user"}
    with pytest.raises(UsageError, match=r"\$PRIMUS_GPU_MODEL: unknown GPU model 'mi325y'"):
        probe(machine, {"PRIMUS_GPU_MODEL": "mi325y"})


def test_nvidia_cards_beside_instincts_are_left_out_and_said(machine: Path) -> None:
    grow("h100-8", machine)
    facts = probe(machine)
    assert [device.model for device in facts.devices] == ["MI300X"] * 8
    assert told(facts).count("is ignored: this machine uses its AMD GPUs") == 8


def test_a_number_of_thousands_of_digits_is_not_believed(machine: Path) -> None:
    """Python refuses to convert them."""
    for file in ("current_link_width", "current_link_speed", "numa_node"):
        for path in machine.glob(f"sys/bus/pci/devices/*/{file}"):
            path.write_text("9" * 5000)
    (machine / "opt/rocm/.info").mkdir(parents=True)
    (machine / "opt/rocm/.info/version").write_text("9" * 5000)
    facts = probe(machine)
    assert {device.pcie.width for device in facts.devices} == {None}
    build_environment(JobNode(facts=facts, network=Network()), GivenVariables())


def test_what_tools_and_libraries_need_is_not_imported_for_files(machine: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from primus.machine.probe import probe
probe(Path({str(machine)!r}))
probe(tools="never")
print(*{{"psutil", "ctypes", "primus.machine.tools.smi", "primus.machine.nvidia.nvml"}}.intersection(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n"
