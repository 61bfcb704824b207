"""Environment variables of a node's processes, each with its layer, reason and overridden values.

Precedence, lowest first: base, vendor, architecture, GPU model, backend, kind of NIC, network, deterministic mode,
tuned files, hooks, patches, the experiment's `env:`, the user's shell, `--env`. A value that the user set is never
changed; an empty value set by the user keeps the variable unset."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from msgspec import Struct, structs

from primus.errors import PrimusError, UsageError
from primus.machine import profile
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import Device, MachineFacts
from primus.machine.framework import Framework, find_framework
from primus.machine.network import SOCKET_VARIABLES, Network, validate_network_variables
from primus.machine.profile import CORES_PER_PROCESS, Condition, Setting
from primus.machine.tree import parse_int
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

AMD_ONLY = ("HSA_", "HIP_", "RCCL_", "NVTE_CK_", "NVTE_ROCM_")
"""Prefixes of variables that have no effect on other vendors' machines and are not set there."""

SHOWN_PREFIXES = (
    *AMD_ONLY,
    *("NCCL_", "FI_", "OFI_NCCL_", "GLOO_", "MSCCLPP_", "UCCL_", "MORI_", "UCX_", "CUDA_", "GPU_", "ROC", "NVTE_"),
    *("TE_", "HIPBLASLT_"),
    *("TORCH_", "PYTORCH_", "XLA_", "JAX_", "PRIMUS_TURBO_"),
)
"""Prefixes of variables that are listed if the user has set them."""
SHOWN = frozenset({"HF_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PRIMUS_DETERMINISTIC", "PRIMUS_GPU_MODEL"})

USER_LAYERS = ("experiment", "user", "--env")
"""Layers that hold the user's values; their conflicts with other layers are reported."""

FAMILIES = {"MI300": "MI300X", "MI250": "MI250X"}
"""Model whose settings an unknown member of a family gets; its figures are not used."""

ASKED = ("--env", "replay of ")
"""Prefixes of the sources that override the shell."""

DETERMINISTIC = "PRIMUS_DETERMINISTIC"
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
        "TE_HIPBLASLT_TUNING_RUN_COUNT": Setting(value="0", reason="no kernels chosen by timing", source=_PRIMUS),
        "TE_HIPBLASLT_TUNING_ALGO_COUNT": Setting(value="0", reason="no kernels chosen by timing", source=_PRIMUS),
    },
    "nvidia": {
        "CUBLAS_WORKSPACE_CONFIG": Setting(value=":4096:8", reason="cuBLAS repeats itself", source="cuBLAS guide"),
    },
}
"""Settings of a deterministic run, by layer."""

NCCL_DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "TRACE")
NCCL_IB_TIMEOUTS = range(1, 23)
"""NCCL user guide, environment variables."""


class Assignment(Protocol):
    """A value and its source, such as `launch.plan.Variable`."""

    @property
    def value(self) -> str: ...
    @property
    def source(self) -> str: ...


class OverriddenVariable(Struct, frozen=True):
    """A value that was overridden."""

    layer: str
    value: str | None
    reason: str


class VariableChoice(Struct, frozen=True, kw_only=True):
    """The value chosen for a variable."""

    name: str
    value: str | None
    """None leaves it unset."""
    layer: str
    """``base``, ``amd``, ``gfx942``, ``mi300x``, ``backend:megatron``, ``nic:broadcom``, ``network``,
    ``deterministic``, ``tuned``, ``hook``, ``patch``, ``experiment``, ``user`` (the shell) or ``--env``."""
    reason: str
    source: str
    overrode: tuple[OverriddenVariable, ...] = ()
    """Different values of lower layers, the nearest first."""


class Environment(Struct, frozen=True, kw_only=True):
    """All variables that a layer or the user sets, and warnings about them."""

    variables: dict[str, VariableChoice]
    warnings: tuple[str, ...] = ()


def build_environment(
    facts: MachineFacts,
    network: Network,
    layout: ClusterLayout | None,
    environ: Mapping[str, str],
    given: Mapping[str, Assignment],
    *,
    typed: Sequence[Mapping[str, Assignment]] = (),
    workload: JobWorkload | None = None,
    torch: str | None = None,
    hooks: Mapping[str, Assignment] | None = None,
    patches: Mapping[str, Assignment] | None = None,
    rocm_library: str | None = None,
    tuned: Settings | None = None,
) -> Environment:
    """The variables of the processes on this node.

    Args:
        facts: The machine.
        network: How its nodes reach each other.
        layout: Position of this node in the launch; None is a single node.
        environ: The user's shell.
        given: Values of the experiment and of a replayed run, distinguished by their source.
        typed: Values given for this launch by files and `--env`; the last wins.
        workload: The job that they run; None for a job without a backend.
        torch: Version of the PyTorch that they use; None if it is not known.
        hooks: Values that hooks print.
        patches: Values that patches print.
        rocm_library: Folder of ROCm's libraries if there is one, see `find_rocm_library`.
        tuned: Settings by which the processes use what was tuned on this machine.

    Raises:
        UsageError: A value contradicts deterministic mode, or gives an address instead of an interface name.
    """
    written, repeated = _split_assignments(given)
    asked = [repeated, *typed]
    user_values = {
        **_format_assignments(written),
        **environ,
        **_format_assignments({name: item for some in asked for name, item in some.items()}),
    }
    framework = find_framework(workload.framework) if workload else None
    needs = _find_conditions(facts, network, layout, torch) | set(framework.LIBRARIES if framework else ())
    machine, warnings = _list_machine_layers(facts)
    settings = [*machine, *_build_path_settings(user_values), *_build_backend_settings(facts, workload, framework)]
    settings += [*_build_nic_settings(facts, network, needs), *_build_network_settings(facts, network, needs)]
    if not _is_on(user_values.get(DETERMINISTIC, "")):
        settings += [("tuned", tuned or {})]
    else:
        settings += [("deterministic", DETERMINISTIC_SETTINGS.get(name, {})) for name, _ in machine]
    chosen: dict[str, VariableChoice] = {}
    # Later ones win: what a person typed for this launch comes last.
    for choice in (
        *_choose_machine_settings(settings, needs, _count_cores_per_process(facts, layout)),
        *_format_setter("hook", hooks or {}),
        *_format_setter("patch", patches or {}),
    ):
        _merge_choice(chosen, choice)
    shell = _choose_shell_variables(environ, known={*chosen, *given, *(name for some in typed for name in some)})
    last = [choice for some in asked for choice in _format_setter("--env", some)]
    for choice in (*_format_setter("experiment", written), *shell, *last):
        _merge_choice(chosen, choice)
    _check_determinism(chosen)
    _check_interfaces(chosen)
    if rocm_library and any(device.vendor == "amd" for device in facts.devices):
        _add_library(chosen, rocm_library)
    problems = (*warnings, *network.warnings, *validate_network_variables(user_values, facts))
    doubts = (*_find_conflicts(chosen), *_find_dubious_values(chosen, facts))
    return Environment(variables=dict(sorted(chosen.items())), warnings=(*problems, *doubts))


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


def _find_conditions(
    facts: MachineFacts, network: Network, layout: ClusterLayout | None, torch: str | None
) -> set[Condition]:
    """The conditions that hold for this launch."""
    holds: set[Condition] = {"always"}
    if layout is not None and layout.nproc > 1 and facts.cpu.usable:
        holds.add("several processes")
    if layout is not None and layout.nnodes > 1:
        holds |= {"several nodes", "rdma"} if network.hcas or network.ports else {"several nodes"}
    if facts.software.rocm:
        holds.add("rocm 7.2.1" if _parse_version(facts.software.rocm) >= (7, 2, 1) else "rocm before 7.2.1")
    if torch and _parse_version(torch) < (2, 8):
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
        return profile.list_layers(profile.find_profile("cpu")), []
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


def _build_path_settings(user_values: Mapping[str, str]) -> Iterator[tuple[str, Settings]]:
    """The Hugging Face cache in DATA_PATH, as in AMD-AGI/Primus."""
    data = user_values.get("DATA_PATH")
    if data:
        home = f"{data.rstrip('/')}/huggingface"
        yield "base", {"HF_HOME": Setting(value=home, reason="below DATA_PATH", source=LAUNCHER)}


def _build_backend_settings(
    facts: MachineFacts, workload: JobWorkload | None, framework: Framework | None
) -> Iterator[tuple[str, Settings]]:
    """Settings of the job's backend for its layout; only on machines with GPUs."""
    if workload is None or framework is None or not facts.devices:
        return
    device = profile.find_profile_by_name(facts.model) if facts.model else None
    is_amd = any(gpu.vendor == "amd" for gpu in facts.devices)
    settings = framework.settings(workload, device)
    kept = {name: item for name, item in settings.items() if is_amd or not name.startswith(AMD_ONLY)}
    yield f"backend:{workload.framework}", kept


def _build_nic_settings(facts: MachineFacts, network: Network, needs: set[Condition]) -> Iterator[tuple[str, Settings]]:
    found = profile.load_nic(network.nic_kind) if network.nic_kind and "rdma" in needs else None
    if found is None or not facts.devices:
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


def _build_network_settings(
    facts: MachineFacts, network: Network, needs: set[Condition]
) -> Iterator[tuple[str, Settings]]:
    """Settings of the network that this node uses to reach the others; those of NCCL and RCCL only with GPUs."""
    if "several nodes" not in needs:
        return

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


def _count_cores_per_process(facts: MachineFacts, layout: ClusterLayout | None) -> str:
    return str(max(1, (facts.cpu.usable or 1) // (layout.nproc if layout else 1)))


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


def _split_assignments(given: Mapping[str, Assignment]) -> tuple[dict[str, Assignment], dict[str, Assignment]]:
    """Values of the experiment, and values for this launch: from `--env` or a replayed run."""
    typed = {name: item for name, item in given.items() if item.source.startswith(ASKED)}
    return {name: item for name, item in given.items() if name not in typed}, typed


def _format_assignments(given: Mapping[str, Assignment]) -> dict[str, str]:
    return {name: item.value for name, item in given.items()}


def _format_setter(layer: str, values: Mapping[str, Assignment]) -> Iterator[VariableChoice]:
    for name, item in values.items():
        yield VariableChoice(name=name, value=item.value, layer=layer, reason=f"set by {layer}", source=item.source)


def _choose_shell_variables(environ: Mapping[str, str], known: Collection[str]) -> Iterator[VariableChoice]:
    """Variables of the user's shell that are in `known` or worth showing."""
    for name, value in environ.items():
        if name in known or name in SHOWN or name.startswith(SHOWN_PREFIXES):
            reason = "set in the shell" if value else "empty: not to be set"
            yield VariableChoice(name=name, value=value, layer="user", reason=reason, source="environment")


def _merge_choice(chosen: dict[str, VariableChoice], choice: VariableChoice) -> None:
    """Let `choice` override the current choice."""
    lost = chosen.get(choice.name)
    if lost and lost.value == choice.value:
        chosen[choice.name] = structs.replace(choice, overrode=lost.overrode)
    elif lost:
        overrode = (OverriddenVariable(lost.layer, lost.value, lost.reason), *lost.overrode)
        chosen[choice.name] = structs.replace(choice, overrode=overrode)
    else:
        chosen[choice.name] = choice


def _add_library(chosen: dict[str, VariableChoice], folder: str) -> None:
    """Append ROCm's libraries to the library path, so that the user's own libraries come first."""
    current = chosen.get("LD_LIBRARY_PATH")
    if current is None or current.value:
        folders = current.value.split(":") if current and current.value else []
        if folder not in folders:
            value = ":".join([*folders, folder])
            reason = "ROCm's libraries, behind the folders that were set" if folders else "ROCm's libraries"
            _merge_choice(
                chosen, VariableChoice(name="LD_LIBRARY_PATH", value=value, layer="amd", reason=reason, source=LAUNCHER)
            )


def _check_determinism(chosen: Mapping[str, VariableChoice]) -> None:
    for name, choice in chosen.items():
        wanted = next((lost for lost in choice.overrode if lost.layer == "deterministic"), None)
        if wanted and wanted.value != choice.value:
            raise UsageError(
                f"{DETERMINISTIC} needs {name}={wanted.value}: {choice.layer} ({choice.source}) has {choice.value!r}",
                f"unset {name}, or unset {DETERMINISTIC}",
            )


def _check_interfaces(chosen: Mapping[str, VariableChoice]) -> None:
    """An address in place of an interface's name makes Gloo fail on every rank (AMD-AGI/Primus#1063)."""
    for name in SOCKET_VARIABLES:
        choice = chosen.get(name)
        entries = (choice.value or "").lstrip("^=").split(",") if choice else []
        address = next(filter(_is_address, entries), None)
        if choice and address:
            assert choice.layer != "network", "an interface has a name"
            raise UsageError(
                f"{name}={choice.value} ({choice.layer}, {choice.source}): {address} is an IP address",
                "use the name of an interface, such as eth0",
            )


def _is_address(text: str) -> bool:
    try:
        ip_address(text.strip())
    except ValueError:
        return False
    return True


def _find_conflicts(chosen: Mapping[str, VariableChoice]) -> Iterator[str]:
    for name, choice in chosen.items():
        lost = next((lost for lost in choice.overrode if lost.layer not in USER_LAYERS), None)
        if lost and lost.value != choice.value and choice.layer in USER_LAYERS:
            wanted = "unset" if lost.value is None else lost.value
            yield f"{name}: keeping the value of {choice.layer}; {lost.layer} recommends {wanted}: {lost.reason}"


def _find_dubious_values(chosen: Mapping[str, VariableChoice], facts: MachineFacts) -> Iterator[str]:
    """Common values that the libraries do not document, and AMD variables on NVIDIA machines."""
    strays = [name for name in chosen if name.startswith(AMD_ONLY)]
    if strays and any(device.vendor == "nvidia" for device in facts.devices):
        yield f"{', '.join(strays)}: for AMD devices only, no effect on this machine"
    debug, timeout = (chosen[name].value if name in chosen else None for name in ("NCCL_DEBUG", "NCCL_IB_TIMEOUT"))
    if debug and debug.upper() not in NCCL_DEBUG_LEVELS:
        yield f"NCCL_DEBUG={debug}: valid values are {', '.join(NCCL_DEBUG_LEVELS)}"
    if timeout and parse_int(timeout) not in NCCL_IB_TIMEOUTS:
        yield f"NCCL_IB_TIMEOUT={timeout}: valid values are 1 to 22 (exponent of two)"
    if "RCCL_DEBUG" in chosen:
        yield "RCCL does not read RCCL_DEBUG; set NCCL_DEBUG"
