"""Environment variables of a node's processes, each with its layer, reason and overridden values.

Precedence, lowest first: base, GPUs of all vendors, vendor, architecture, GPU model, framework, kind of NIC, network,
deterministic mode, tuned files, hooks, patches, the experiment's `env:`, the user's shell, `--env`. A value that the
user set is never changed; an empty value set by the user keeps the variable unset."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from msgspec import Struct

from primus import registry
from primus.errors import PrimusError
from primus.framework import VARIABLES, FrameworkVariables
from primus.machine import profile
from primus.machine.cluster import ClusterLayout
from primus.machine.environment.checks import (
    check_determinism,
    check_interfaces,
    find_conflicts,
    find_dubious_values,
    find_runtime_tuning_problems,
)
from primus.machine.environment.hipblaslt import RUNTIME_TUNING
from primus.machine.environment.variable_choice import AMD_ONLY, DETERMINISTIC, Assignment, VariableChoice, merge_choice
from primus.machine.facts import Device, MachineFacts
from primus.machine.network.selection import SOCKET_VARIABLES, Network, validate_network_variables
from primus.machine.profile import CORES_PER_PROCESS, Condition, Setting
from primus.machine.workload import JobWorkload

Settings = Mapping[str, Setting]

NEVER_SET = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "LD_PRELOAD",
        "NVIDIA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "XLA_FLAGS",
    }
)
"""Variables that only the user or the scheduler may set; no layer sets them."""

SHOWN_PREFIXES = (
    *AMD_ONLY,
    *("NCCL_", "FI_", "OFI_NCCL_", "GLOO_", "MSCCLPP_", "UCCL_", "MORI_", "UCX_", "CUDA_", "GPU_", "ROC", "NVTE_"),
    *("TE_", "HIPBLASLT_"),
    *("TORCH_", "PYTORCH_", "XLA_", "JAX_", "PRIMUS_TURBO_"),
)
"""Prefixes of variables that are listed if the user has set them."""
SHOWN = frozenset({"HF_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PRIMUS_DETERMINISTIC", "PRIMUS_GPU_MODEL"})

FAMILIES = {"MI300": "MI300X", "MI250": "MI250X"}
"""Model whose settings an unknown member of a family gets; its figures are not used."""

ASKED = ("--env", "replay of ")
"""Prefixes of the sources that override the shell."""

LAUNCHER = "AMD-AGI/Primus base_env.sh"
_PRIMUS = "AMD-AGI/Primus, deterministic mode"
DETERMINISTIC_SETTINGS: dict[str, Settings] = {
    "gpu": {
        "NCCL_ALGO": Setting(value="Ring", reason="sums in one order", source=_PRIMUS),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": Setting(value="0", reason="deterministic attention only", source=_PRIMUS),
        "TORCH_COMPILE_DISABLE": Setting(value="1", reason="no kernels chosen by timing", source=_PRIMUS),
    },
    "amd": {
        "ROCBLAS_DEFAULT_ATOMICS_MODE": Setting(value="0", reason="no atomics in matrix products", source=_PRIMUS),
        "PRIMUS_TURBO_AUTO_TUNE": Setting(value="0", reason="no kernels chosen by timing", source=_PRIMUS),
        "HIPBLASLT_TUNING_MODE": Setting(value="off", reason="no kernels chosen by timing", source="hipBLASLt guide"),
        "TE_HIPBLASLT_TUNING_RUN_COUNT": Setting(value="0", reason="no kernels chosen by timing", source=_PRIMUS),
        "TE_HIPBLASLT_TUNING_ALGO_COUNT": Setting(value="0", reason="no kernels chosen by timing", source=_PRIMUS),
    },
    "nvidia": {
        "CUBLAS_WORKSPACE_CONFIG": Setting(value=":4096:8", reason="cuBLAS repeats itself", source="cuBLAS guide")
    },
}
"""Settings of a deterministic run, by layer."""


class Environment(Struct, frozen=True, kw_only=True):
    """All variables that a layer or the user sets, and warnings about them."""

    variables: dict[str, VariableChoice]
    warnings: tuple[str, ...] = ()


class JobNode(Struct, frozen=True, kw_only=True):
    """A node of a job: what decides the variables of its processes."""

    facts: MachineFacts
    network: Network
    """How its nodes reach each other."""
    layout: ClusterLayout = ClusterLayout(nproc=1)
    workload: JobWorkload | None = None
    """The job that they run; None for a job without a framework."""
    torch: str | None = None
    """Version of the PyTorch that they use; None if it is not known."""
    rocm_library: str | None = None
    """Folder of ROCm's libraries if there is one, see `find_rocm_library`."""
    tuned: Settings = {}
    """Settings by which the processes use what was tuned on this machine."""


class GivenVariables(Struct, frozen=True, kw_only=True):
    """The values that the user, hooks and patches give."""

    shell: Mapping[str, str] = {}
    given: Mapping[str, Assignment] = {}
    """Values of the experiment and of a replayed run, distinguished by their source."""
    typed: Sequence[Mapping[str, Assignment]] = ()
    """Values given for this launch by files and `--env`; the last wins."""
    hooks: Mapping[str, Assignment] = {}
    patches: Mapping[str, Assignment] = {}


def build_environment(node: JobNode, values: GivenVariables) -> Environment:
    """The variables of the processes on a node.

    Raises:
        UsageError: A value contradicts deterministic mode, or gives an address instead of an interface name.
    """
    # Lowest first: the experiment's `env:`, the shell, and values for this launch, from `--env` or a replayed run.
    typed = (_select_assignments(values.given, is_asked=True), *values.typed)
    written = _select_assignments(values.given, is_asked=False)
    user = {name: item.value for name, item in written.items()} | dict(values.shell)
    user |= {name: item.value for some in typed for name, item in some.items()}
    needs = _find_conditions(node)
    machine, warnings = _list_machine_layers(node.facts)
    layers = [*machine, *_build_path_settings(user)]
    if node.facts.devices:
        framework = _find_variables(node.workload.framework) if node.workload else None
        needs |= set(framework.LIBRARIES if framework else ())
        layers += [*_build_backend_settings(node, framework), *_build_nic_settings(node, needs)]
    if node.layout.nnodes > 1:
        layers += _build_network_settings(node)
    layers += _list_last_layers(machine, node.tuned, is_deterministic=_is_on(user.get(DETERMINISTIC, "")))
    cores_per_process = str(max(1, (node.facts.cpu.usable or 1) // node.layout.nproc))
    chosen: dict[str, VariableChoice] = {}
    for choice in _choose_machine_settings(layers, needs, cores_per_process):
        merge_choice(chosen, choice)
    known = {*chosen, *values.hooks, *values.patches, *written, *(name for some in typed for name in some)}
    for layer, given in (("hook", values.hooks), ("patch", values.patches), ("experiment", written)):
        _merge_assignments(chosen, layer, given)
    _merge_shell_variables(chosen, values.shell, known)
    for some in typed:
        _merge_assignments(chosen, "--env", some)
    check_determinism(chosen)
    check_interfaces(chosen)
    if node.rocm_library and any(device.vendor == "amd" for device in node.facts.devices):
        _add_library(chosen, node.rocm_library)
    problems = (*warnings, *node.network.warnings, *_find_problems(chosen, user, node))
    return Environment(variables=dict(sorted(chosen.items())), warnings=problems)


def _find_problems(chosen: Mapping[str, VariableChoice], user: Mapping[str, str], node: JobNode) -> Iterator[str]:
    if node.facts.interfaces or node.facts.rdma:
        yield from validate_network_variables(user, node.facts)
    yield from find_conflicts(chosen)
    yield from find_dubious_values(chosen, node.facts)
    if RUNTIME_TUNING in chosen:
        yield from find_runtime_tuning_problems(chosen, node.layout.world_size)


def _list_last_layers(
    machine: Iterable[tuple[str, Settings]], tuned: Settings, *, is_deterministic: bool
) -> list[tuple[str, Settings]]:
    # Never both: what was tuned was chosen by timing, which may choose otherwise the next time.
    if is_deterministic:
        return [("deterministic", DETERMINISTIC_SETTINGS.get(name, {})) for name, _ in machine]
    return [("tuned", tuned)]


def find_rocm_library(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Directory of ROCm's libraries on this machine; None without ROCm."""
    for home in (environ.get("ROCM_HOME"), environ.get("ROCM_PATH"), "/opt/rocm"):
        if home and (root / home.lstrip("/") / "lib").is_dir():
            return f"{home.rstrip('/')}/lib"
    return None


def find_torch_version(facts: MachineFacts, path: Iterable[str]) -> str | None:
    """Version of the PyTorch that Python would import from `path`; looked up only if a setting depends on it."""
    if facts.assumed or not any(device.vendor == "nvidia" for device in facts.devices):
        return None
    from primus.bootstrap.torch_builds import find_installed_build  # not for machines without such a setting

    build = find_installed_build(path)
    return build.torch if build else None


def _find_conditions(node: JobNode) -> set[Condition]:
    """The conditions that hold for this launch."""
    holds: set[Condition] = {"always"}
    rocm = node.facts.software.rocm
    if node.layout.nproc > 1 and node.facts.cpu.usable:
        holds.add("several processes")
    if node.layout.nnodes > 1:
        holds |= {"several nodes", "rdma"} if node.network.hcas or node.network.ports else {"several nodes"}
    if rocm:
        holds.add("rocm 7.2.1" if _parse_version(rocm) >= (7, 2, 1) else "rocm before 7.2.1")
    if node.torch and _parse_version(node.torch) < (2, 8):
        holds.add("torch before 2.8")
    return holds


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d{1,9}", text)[:3]))


def _is_on(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "false", "no", "off")


def _list_machine_layers(facts: MachineFacts) -> tuple[list[tuple[str, Settings]], list[str]]:
    """Layers that all devices share, lowest first, and warnings about the devices."""
    kinds: dict[tuple[str, str | None, str], Device] = {}
    for device in facts.devices:
        kinds.setdefault((device.vendor, device.model, device.architecture or ""), device)
    if not kinds:
        return profile.list_architecture_layers("base"), []
    warnings: list[str] = []
    chains = [_list_device_layers(device, warnings) for device in kinds.values()]
    shared = takewhile(lambda level: len({label for label, _ in level}) == 1, zip(*chains, strict=False))
    layers = [level[0] for level in shared]
    if len(kinds) > 1:
        models = ", ".join(sorted({model or "unknown" for _, model, _ in kinds}))
        warnings.append(f"GPUs of different models ({models}): only common settings are applied")
    return layers, warnings


def _list_device_layers(device: Device, warnings: list[str]) -> list[tuple[str, Settings]]:
    known = profile.find_profile_by_name(device.model) if device.model else None
    if known:
        return profile.list_layers(known)
    called = device.model or device.name or f"{device.vendor} device {device.device_id or 'without an id'}"
    family = re.search(rf"\b({'|'.join(FAMILIES)})", called.upper())
    if family and device.vendor == "amd":
        warnings.append(f"unknown GPU model {called}: using the settings of {FAMILIES[family[1]]}")
        return profile.list_layers(profile.find_profile(FAMILIES[family[1]]))
    layers = profile.list_architecture_layers(device.architecture or "") or profile.list_architecture_layers(
        device.vendor
    )
    warnings.append(f"unknown GPU model {called}: using the settings of '{layers[-1][0]}'")
    return layers


def _build_path_settings(user: Mapping[str, str]) -> Iterator[tuple[str, Settings]]:
    """The Hugging Face cache in DATA_PATH, as in AMD-AGI/Primus."""
    data = user.get("DATA_PATH")
    if data:
        home = f"{data.rstrip('/')}/huggingface"
        yield "base", {"HF_HOME": Setting(value=home, reason="below DATA_PATH", source=LAUNCHER)}


def _find_variables(framework: str) -> FrameworkVariables | None:
    """The variables of a framework; None if it has none of its own."""
    return registry.load_plug_in(VARIABLES, framework) if registry.has_plug_in(VARIABLES.name, framework) else None


def _build_backend_settings(node: JobNode, framework: FrameworkVariables | None) -> Iterator[tuple[str, Settings]]:
    """Settings of the job's framework for its layout."""
    facts, workload = node.facts, node.workload
    if workload is None or framework is None:
        return
    device = profile.find_profile_by_name(facts.model) if facts.model else None
    is_amd = any(gpu.vendor == "amd" for gpu in facts.devices)
    settings = framework.list_settings(workload, device)
    kept = {name: item for name, item in settings.items() if is_amd or not name.startswith(AMD_ONLY)}
    yield f"backend:{workload.framework}", kept


def _build_nic_settings(node: JobNode, needs: set[Condition]) -> Iterator[tuple[str, Settings]]:
    facts, network = node.facts, node.network
    found = profile.load_nic(network.nic_kind) if network.nic_kind and "rdma" in needs else None
    if found is None:
        return
    is_amd = any(device.vendor == "amd" for device in facts.devices)
    settings = {name: item for name, item in found.settings.items() if is_amd or not name.startswith(AMD_ONLY)}
    yield f"nic:{found.kind}", settings
    if found.kind == "ainic" and facts.traffic_classes:
        data, control = facts.traffic_classes
        reason = "as the NICs map their lossless and strict queues (nicctl show qos)"
        yield (
            f"nic:{found.kind}",
            {
                "NCCL_IB_TC": Setting(value=str(data), reason=reason, source="this machine"),
                "NCCL_IB_FIFO_TC": Setting(value=str(control), reason=reason, source="this machine"),
            },
        )


def _build_network_settings(node: JobNode) -> Iterator[tuple[str, Settings]]:
    """Settings of the network that this node uses to reach the others; those of NCCL and RCCL only with GPUs."""
    facts, network = node.facts, node.network

    def make_setting(value: str, field: str) -> Setting:
        return Setting(value=value, reason=network.reasons.get(field, "found on this node"), source="this machine")

    settings: dict[str, Setting] = {}
    if network.interface:
        names = SOCKET_VARIABLES if facts.devices else ("GLOO_SOCKET_IFNAME",)
        settings |= dict.fromkeys(names, make_setting(network.interface, "interface"))
    if facts.devices and network.hcas:
        settings["NCCL_IB_HCA"] = make_setting(
            "=" + ",".join(network.hcas), "hcas"
        )  # without '=' NCCL matches a name as a prefix
        if network.gid_index is not None:
            settings["NCCL_IB_GID_INDEX"] = make_setting(str(network.gid_index), "gid_index")
    yield "network", settings


def _choose_machine_settings(
    layers: Iterable[tuple[str, Settings]], needs: set[Condition], cores_per_process: str
) -> Iterator[VariableChoice]:
    for layer, settings in layers:
        for name, setting in settings.items():
            if name in NEVER_SET:
                raise PrimusError(f"layer '{layer}' sets {name}", "only the user or the scheduler may set it")
            others = [value for condition, value in setting.alternatives.items() if condition in needs]
            if setting.when in needs or others:
                value = setting.value if setting.when in needs else others[0]
                value = cores_per_process if value == CORES_PER_PROCESS else value
                yield VariableChoice(name=name, value=value, layer=layer, reason=setting.reason, source=setting.source)


def _select_assignments(given: Mapping[str, Assignment], *, is_asked: bool) -> dict[str, Assignment]:
    """Those for this launch, from `--env` or a replayed run, or those of the experiment."""
    return {name: item for name, item in given.items() if item.source.startswith(ASKED) is is_asked}


def _merge_assignments(chosen: dict[str, VariableChoice], layer: str, values: Mapping[str, Assignment]) -> None:
    for name, item in values.items():
        merge_choice(
            chosen,
            VariableChoice(name=name, value=item.value, layer=layer, reason=f"set by {layer}", source=item.source),
        )


def _merge_shell_variables(
    chosen: dict[str, VariableChoice], environ: Mapping[str, str], known: Collection[str]
) -> None:
    """Let those variables of the user's shell override that are in `known` or worth showing."""
    for name, value in environ.items():
        if name in known or name in SHOWN or name.startswith(SHOWN_PREFIXES):
            reason = "set in the shell" if value else "empty: not to be set"
            merge_choice(
                chosen, VariableChoice(name=name, value=value, layer="user", reason=reason, source="environment")
            )


def _add_library(chosen: dict[str, VariableChoice], folder: str) -> None:
    """Append ROCm's libraries to the library path, so that the user's own libraries come first."""
    current = chosen.get("LD_LIBRARY_PATH")
    if current is None or current.value:
        folders = current.value.split(":") if current and current.value else []
        if folder not in folders:
            value = ":".join([*folders, folder])
            reason = "ROCm's libraries, behind the folders that were set" if folders else "ROCm's libraries"
            merge_choice(
                chosen, VariableChoice(name="LD_LIBRARY_PATH", value=value, layer="amd", reason=reason, source=LAUNCHER)
            )
