"""Describe machine and versions for an issue, without names of people and hosts, addresses and secrets."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from primus import __version__, package_files
from primus.engines.installation import list_installations
from primus.engines.requirement import list_engines
from primus.machine.facts import MachineFacts, RdmaDevice
from primus.redaction import is_harmless_variable, redact
from primus.site_folders import find_version, list_package_versions
from primus.task import TaskContext

TOOLS = (
    *("srun", "docker", "podman", "apptainer", "enroot", "kubectl", "ssh", "uv", "git", "amd-smi", "rocm-smi"),
    *("nvidia-smi", "ibv_devinfo"),
)
"""Programs whose presence explains what a command can do here."""
FAMILIES = (
    *("PRIMUS_", "NCCL_", "RCCL_", "UCCL_", "GLOO_", "UCX_", "FI_", "HSA_", "HIP_", "ROCR_", "ROCM_", "CUDA_", "NVTE_"),
    *("TORCH", "PYTORCH_", "TRITON_", "XLA_", "JAX_", "OMP_", "MKL_", "NVIDIA_"),
)
"""Beginnings of the variables that change how primus and its libraries work."""
ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+|\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.I
)
"""IPv4 addresses, mail addresses, MAC addresses."""
HOME = re.compile(r"(/home|/Users|/users)/[^/:;,\s]+")
PLACE = re.compile(r"HOST|ADDR|NODE|SERVER|ENDPOINT|COMM_ID|UR[IL]|USER|TEAM|GROUP|PROJECT|(?<!IF)NAME|PATH|DIR|HOME")
"""Parts of the names of variables whose values say where or for whom something runs; not NCCL_SOCKET_IFNAME."""
PLAIN = re.compile(r"(?:[\w^=+%,-]|\b\d+\.\d+\b|:\d{1,2}\b)*")
"""Switches, numbers, and names of devices with their ports: no path, no address."""
SET = "(set)"
"""In place of a value that may be private."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `env report`."""


class IssueReport(Struct, frozen=True, kw_only=True):
    """What an issue needs to know of a machine."""

    versions: dict[str, str]
    machine: dict[str, str]
    tools: list[str]
    """Programs on PATH."""
    variables: dict[str, str]
    """Variables of the shell that change how primus works; values that may be private are left out."""
    packages: dict[str, str]
    """Installed packages of other versions than those that primus is developed with."""
    problems: list[str]
    """Facts that could not be read."""


def run(options: Options, context: TaskContext) -> None:
    """Print the report as Markdown, to be pasted into an issue."""
    environ = context.environ if context.shell is None else context.shell
    report = build_report(context.facts(), environ)
    context.result(report, _format_report(report))


def build_report(facts: MachineFacts, environ: Mapping[str, str]) -> IssueReport:
    """The report, with the names of this user and host replaced in every text."""
    names = _list_private_names(facts, environ)

    def clean(text: str) -> str:
        return _hide_names(redact(text), names)

    return IssueReport(
        versions={name: clean(text) for name, text in _list_versions(facts, environ).items()},
        machine={name: clean(text) for name, text in _describe_machine(facts).items()},
        tools=[tool for tool in TOOLS if shutil.which(tool, path=environ.get("PATH"))],
        variables={name: clean(text) for name, text in _list_variables(environ).items()},
        packages={name: clean(version) for name, version in _list_other_packages().items()},
        problems=[clean(f"{each.where}: {each.problem}") for each in facts.problems],
    )


def _list_versions(facts: MachineFacts, environ: Mapping[str, str]) -> dict[str, str]:
    software = facts.software
    found = {
        "primus": f"{__version__} ({'package' if package_files.CHECKOUT is None else 'checkout'})",
        "Python": platform.python_version(),
        "PyTorch": find_version("torch", "torch", [entry for entry in sys.path if entry]),
        "ROCm": software.rocm,
        "CUDA": software.cuda,
        "AMD driver": software.amd_driver,
        "NVIDIA driver": software.nvidia_driver,
        "system": software.os or platform.system(),
        "kernel": software.kernel or platform.release(),
    }
    for name, engine in list_engines().items():
        for installation in list_installations(name, engine, environ)[:1]:
            found[engine.title] = f"{installation.version or 'unknown version'} ({installation.place})"
    return {name: str(version) for name, version in found.items() if version}


def _describe_machine(facts: MachineFacts) -> dict[str, str]:
    cpu, memory = facts.cpu, facts.memory
    gpus = Counter(
        f"{device.model or device.name or 'unknown GPU'} ({device.architecture or 'unknown architecture'}"
        f"{', ' + device.partition_mode if device.partition_mode else ''})"
        for device in facts.devices
    )
    nics = Counter(map(_describe_nic, facts.rdma))
    limit = f", limit {memory.limit_bytes / 2**30:.0f} GiB" if memory.limit_bytes else ""
    found = {
        "GPUs": _format_counts(gpus) or "none",
        "RDMA NICs": _format_counts(nics) or "none",
        "CPU": f"{cpu.model}, {cpu.architecture}, {cpu.usable or os.cpu_count()} usable threads",
        "memory": f"{(memory.total_bytes or 0) / 2**30:.0f} GiB{limit}",
        "shared memory": f"{facts.limits.shm_bytes / 2**30:.1f} GiB" if facts.limits.shm_bytes else "",
        "container": facts.container or "none",
        "scheduler": facts.scheduler or "none",
    }
    return {name: text for name, text in found.items() if text}


def _describe_nic(nic: RdmaDevice) -> str:
    ports = "/".join(f"{port.link_layer} {port.rate_gbps or 0:g} Gbit/s {port.state}" for port in nic.ports)
    firmware = f", firmware {nic.firmware}" if nic.firmware else ""
    return f"{nic.kind or 'unknown NIC'} {nic.hca_type or ''}{firmware} ({ports or 'no port'})".replace("  ", " ")


def _format_counts(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{number} x {text}" for text, number in counts.items())


def _list_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value if _is_public(name, value) else SET
        for name, value in sorted(environ.items())
        if name.startswith(FAMILIES)
    }


def _is_public(name: str, value: str) -> bool:
    return is_harmless_variable(name, value) and not PLACE.search(name) and PLAIN.fullmatch(value) is not None


def _list_other_packages() -> dict[str, str]:
    """Those without a pin are not listed: the name of a package of a company says who works there."""
    text = (package_files.PACKAGE / "constraints.txt").read_text(encoding="utf-8")
    pins: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, flags=re.MULTILINE):
        pins.setdefault(_normalize(name), set()).add(version)
    found = {}
    for name, version in list_package_versions(sys.path).items():
        pinned = pins.get(_normalize(name), set())
        if pinned and version.partition("+")[0] not in pinned:
            found[name] = version
    return found


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _list_private_names(facts: MachineFacts, environ: Mapping[str, str]) -> dict[str, str]:
    """What to write in place of each name of this user and of this host."""
    hosts = {facts.host, platform.node(), environ.get("HOSTNAME", "")}
    hosts |= {host.partition(".")[0] for host in hosts}
    users = {environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")} | {_find_user()}
    home = environ.get("HOME", "")
    return {
        **dict.fromkeys(filter(None, users), "<user>"),
        **dict.fromkeys(filter(None, hosts), "<host>"),
        **({home: "~"} if len(home) > 1 else {}),
    }


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without an entry, as in containers
        return ""


def _hide_names(text: str, names: Mapping[str, str]) -> str:
    text = ADDRESS.sub("<address>", text)
    for name in sorted(names, key=len, reverse=True):  # a home before the name of its user
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", names[name], text)
    return HOME.sub(r"\1/<user>", text)


def _format_report(report: IssueReport) -> str:
    sections = {
        "Versions": [f"{name}: {text}" for name, text in report.versions.items()],
        "Packages of other versions than the pinned ones": [f"{name} {text}" for name, text in report.packages.items()],
        "Machine": [f"{name}: {text}" for name, text in report.machine.items()],
        "Programs": report.tools,
        "Variables": [f"`{name}={text}`" for name, text in report.variables.items()],
        "Could not be read": report.problems,
    }
    return "\n\n".join(
        "\n".join([f"### {title}", "", *(f"- {entry}" for entry in entries)])
        for title, entries in sections.items()
        if entries
    )
