"""Checks of installed software: versions, loadable libraries, and required programs."""

from __future__ import annotations

import datetime
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from msgspec import Struct

from primus import interpreter
from primus.bootstrap import torch_builds
from primus.config.source import read_package_yaml
from primus.machine import profile
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, format_names
from primus.preflight.findings.rules import About, report_info
from primus.process import CommandResult

LOAD_LIMIT_S = 20.0
TOOL_LIMIT_S = 5.0
COMPAT = "usr/local/cuda*/compat*/**/libcuda.so.*"
"""Libraries that let data center devices run a newer CUDA version than their driver's (CUDA compatibility guide,
forward compatibility); NGC images contain them."""
KNOWN_STACKS = Path(__file__).parent / "known_stacks.yaml"
PACKAGES = (
    "torch",
    "transformers",
    "flash-attn",
    "triton",
    "transformer-engine",
    "megatron-core",
    "torchtitan",
    "numpy",
)
"""Packages whose differences between nodes are reported."""


class KnownStack(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of known_stacks.yaml: what all of its conditions describe is slow or wrong."""

    package: str
    """Name, or its beginning for packages of several builds (``nvidia-nccl-cu12``)."""
    since: str = "0"
    before: str = ""
    """First version that is right; empty if none is known."""
    build: str = ""
    """``ROCm`` or ``CUDA``, of PyTorch."""
    build_since: str = "0"
    architectures: list[str] = []
    """Of GPUs; any if there are none."""
    variables: list[str] = []
    """That must be set, to another value than 0."""
    unset: str = ""
    """A variable that must not be set."""
    effect: str
    advice: str
    source: str
    """Public thread."""
    date: datetime.date

    def describes(self, installed: Mapping[str, str], torch: TorchInstallation | None, node: PreflightNode) -> str:
        """The package and version that it is about; empty if the node has none."""
        for name, version in installed.items():
            is_named = name == self.package or name.startswith(f"{self.package}-cu")
            is_old = not self.before or _compare_versions(version, self.before) < 0
            if is_named and is_old and _compare_versions(version, self.since) >= 0 and self._fits(torch, node):
                return f"{name} {version}"
        return ""

    def _fits(self, torch: TorchInstallation | None, node: PreflightNode) -> bool:
        """Whether the build, the devices and the variables are those."""
        number = (torch.hip if self.build == "ROCm" else torch.cuda) if torch and self.build else "0"
        found = {device.architecture for device in node.facts.devices}
        return (
            number is not None
            and (torch is not None or not self.build)
            and _compare_versions(number, self.build_since) >= 0
            and (not self.architectures or bool(found & set(self.architectures)))
            and all(node.environ.get(name, "0") != "0" for name in self.variables)
            and not (self.unset and self.unset in node.environ)
        )


def _compare_versions(one: str, other: str) -> int:
    """Less than, equal to or greater than 0, by the numbers before a local part (``+rocm6.2``)."""
    first, second = ([int(part) for part in re.findall(r"\d+", each.partition("+")[0])] for each in (one, other))
    return (first > second) - (first < second)


class TorchInstallation:
    """Properties of an installed PyTorch, read without importing it."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace")
        self.folder = folder
        self.version = self._find_value(text, "__version__") or "unknown"
        self.cuda = self._find_value(text, "cuda")
        self.hip = self._find_value(text, "hip")

    @staticmethod
    def _find_value(text: str, name: str) -> str | None:
        match = re.search(rf"^{name}(?::[^=]+)? = '([^']*)'", text, re.MULTILINE)
        return match[1] if match else None

    @property
    def format_build(self) -> str:
        return f"ROCm {self.hip}" if self.hip else f"CUDA {self.cuda}" if self.cuda else "CPU"


def find_torch(path: list[str]) -> TorchInstallation | None:
    """The PyTorch that Python would import from `path`."""
    for entry in path:
        if (Path(entry) / "torch" / "version.py").is_file():
            return TorchInstallation(Path(entry) / "torch")
    return None


def check_torch(node: PreflightNode) -> Iterator[CheckFinding]:
    """PyTorch is installed and built for these devices."""
    yield from judge_torch(node, find_torch(sys.path))


def judge_torch(node: PreflightNode, found: TorchInstallation | None) -> Iterator[CheckFinding]:
    """Findings for an installed or missing PyTorch on a node with devices."""
    text = f"{found.version}, built for {found.format_build}" if found else "not installed"
    if not node.has_devices:
        yield report_info("software.torch", text, "training needs it")
        return
    vendor = node.facts.devices[0].vendor
    wanted = {"amd": "ROCm", "nvidia": "CUDA"}[vendor]
    is_right = found is not None and found.format_build.startswith(wanted)
    words = {"wanted": wanted, "vendor": vendor, "status": "fail" if found else "warn"}
    yield node.judge("software.torch", is_right, text, **words)
    if found and wanted == "CUDA" and found.cuda:
        yield _find_cuda_driver(node, found.folder / "version.py")


def _find_cuda_driver(node: PreflightNode, file: Path) -> CheckFinding:
    """The driver supports the CUDA version that PyTorch is built for; an installed toolkit does not matter."""
    build, driver = torch_builds.read_build(file), node.facts.software.nvidia_driver
    runs = torch_builds.find_cuda_of_driver(driver)
    if runs is None:
        shown = f"PyTorch for {build}, driver {driver or 'not known'}"
        return node.judge("software.cuda_driver/unknown", False, shown)
    mismatch = torch_builds.find_mismatch(build, torch_builds.Hardware(vendor="nvidia", driver=driver or ""))
    has_compat = any(node.tree.root.glob(COMPAT))
    shown = f"PyTorch for {build}, driver {driver} for CUDA {runs[0]}.{runs[1]}"
    shown += ", forward compatibility package installed" if mismatch and has_compat else ""
    words = {"wanted": build.version[0], "status": "warn" if has_compat else "fail"}
    return node.judge("software.cuda_driver", mismatch is None, shown, **words)


def check_versions(node: PreflightNode) -> Iterator[CheckFinding]:
    """Versions of Python and of the driver stack."""
    held = node.facts.software
    yield report_info("software.python", held.python or sys.version.split()[0])
    for name, version in (
        ("amd driver", held.amd_driver),
        ("nvidia driver", held.nvidia_driver),
        ("ROCm", held.rocm),
        ("CUDA", held.cuda),
    ):
        if version:
            yield report_info("software.stack", f"{name} {version}", about=About(name))


def check_libraries(node: PreflightNode) -> Iterator[CheckFinding]:
    """The collective library can be loaded, as in a worker."""
    if not node.has_devices or not node.tree.is_live:
        return
    name = "librccl.so.1" if node.facts.devices[0].vendor == "amd" else "libnccl.so.2"
    found = find_torch(sys.path)
    # A worker's library comes with torch, from its own folder or from a package next to it; the loader finds others.
    bundled = [found.folder / "lib" / name, found.folder / "lib" / "librccl.so"] if found else []
    bundled += [found.folder.parent / "nvidia" / "nccl" / "lib" / name] if found else []
    path = next((str(candidate) for candidate in bundled if candidate.exists()), name)
    yield _judge_library(node, "software.collectives", path, name)
    plugin = node.environ.get("NCCL_NET_PLUGIN")
    if plugin and plugin != "none":
        name = plugin if ".so" in plugin else f"libnccl-net-{plugin}.so"
        yield _judge_library(node, "software.net_plugin", name, name)
    elif plugin is None:
        yield from _list_nic_plugins(node)


def _judge_library(node: PreflightNode, row: str, path: str, name: str) -> CheckFinding:
    answer = _load_library(node, path)
    is_loaded = answer.state == "ok"
    return node.judge(row, is_loaded, path if is_loaded else answer.problem, library=name)


def _load_library(node: PreflightNode, name: str) -> CommandResult:
    """Load a shared library in a separate process, since loading a broken one may end the process."""
    code = f"import ctypes; ctypes.CDLL({name!r})"
    return node.run_program(interpreter.build_code_command(sys.executable, code), LOAD_LIMIT_S)


def _list_nic_plugins(node: PreflightNode) -> Iterator[CheckFinding]:
    """Libraries that NCCL or RCCL need for NICs that they do not support themselves."""
    kinds = {device.kind for device in node.facts.rdma if any(port.is_active for port in device.ports)}
    for found in (profile.load_nic(kind) for kind in sorted(filter(None, kinds))):
        if found is None or not found.plugins:
            continue
        loads = next((name for name in found.plugins if _load_library(node, name).state == "ok"), None)
        words = {"plugins": format_names(found.plugins), "nic": found.title}
        yield node.judge("software.net_plugin/nic", loads is not None, loads or "", **words)


def check_known_stacks(node: PreflightNode) -> Iterator[CheckFinding]:
    """No installed version is known to be slow or wrong."""
    known = read_package_yaml(KNOWN_STACKS, list[KnownStack])
    yield from judge_stacks(node, known, list_installed_packages(), find_torch(sys.path))


def judge_stacks(
    node: PreflightNode, known: Sequence[KnownStack], installed: Mapping[str, str], torch: TorchInstallation | None
) -> Iterator[CheckFinding]:
    """A finding for each known stack that the node has, or one that it has none."""
    found = [(stack, text) for stack in known if (text := stack.describes(installed, torch, node))]
    for stack, text in found:
        words = {"effect": stack.effect, "advice": stack.advice, "source": stack.source, "date": stack.date}
        yield node.judge("software.known_stacks", False, text, About(stack.package), **words)
    if not found:
        yield report_info("software.known_stacks", f"none of {len(known)} known to be slow or wrong")


def check_tools(node: PreflightNode) -> Iterator[CheckFinding]:
    """Required programs are installed and run."""
    for name in node.expected.tools:
        answer = node.run_program([name, "--version"], TOOL_LIMIT_S)
        is_there = answer.state in ("ok", "failed")  # some programs do not support --version
        shown = answer.text.strip().partition("\n")[0][:80] or answer.problem
        yield node.judge("software.tool", is_there, shown, About(name), tool=name)


def check_packages(node: PreflightNode) -> Iterator[CheckFinding]:
    """Hash of the installed Python packages, which nodes compare."""
    installed = list_installed_packages()
    digest = hashlib.sha256("\n".join(f"{name} {version}" for name, version in sorted(installed.items())).encode())
    shown = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    text = f"{len(installed)} packages, {digest.hexdigest()[:12]}; {format_names(shown) or 'no torch'}"
    yield node.judge("software.packages", True, text)


def list_installed_packages() -> dict[str, str]:
    """Version by name of the packages that this interpreter finds, from the names of their folders."""
    found: dict[str, str] = {}
    for entry in metadata.MetadataPathFinder.find_distributions():
        folder = getattr(entry, "_path", None)
        match = re.fullmatch(r"(.+?)-([^-]+)(-.*)?\.(dist|egg)-info", folder.name if folder else "")
        if match:
            found.setdefault(match[1].lower().replace("_", "-"), match[2])
    return found


CHECKS = (check_versions, check_torch, check_known_stacks, check_libraries, check_tools, check_packages)
