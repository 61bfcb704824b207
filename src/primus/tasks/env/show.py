"""Show the environment variables that processes get on this or an assumed machine, and why."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from primus import registry
from primus.config.load import load_experiment
from primus.errors import UsageError, did_you_mean
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.cluster import ClusterLayout
from primus.machine.environment.precedence import (
    GivenVariables,
    JobNode,
    build_environment,
    find_rocm_library,
    find_torch_version,
)
from primus.machine.environment.variable_choice import Assignment, VariableChoice
from primus.machine.facts import MachineFacts
from primus.machine.network import selection as network
from primus.machine.workload import JobWorkload
from primus.plan import Variable
from primus.redaction import hide_inherited_value, redact_value
from primus.report.table import format_rows
from primus.task import TaskContext

PURPOSES = {
    "communication": (
        *("NCCL_", "FI_", "OFI_NCCL_", "RCCL_", "MSCCLPP_", "GLOO_", "TORCH_NCCL_", "NET_", "UCCL_", "MORI_", "UCX_"),
    ),
    "attention, fp8 and kernels": ("NVTE_", "PRIMUS_TURBO_", "TE_", "HIPBLASLT_", "ROCBLAS_", "CUBLAS_"),
    "GPU runtime": ("HSA_", "HIP_", "ROCR_", "GPU_", "CUDA_", "NVIDIA_", "AMD_"),
    "PyTorch and JAX": ("TORCH_", "PYTORCH_", "XLA_", "JAX_"),
}
"""Purpose of variables, by prefix."""
OTHER = "paths and others"
ORDER = (*PURPOSES, OTHER)
UNSET = "(unset)"


class Options(Struct, frozen=True, kw_only=True):
    """Options of `env show`."""

    config: Annotated[str | None, Meta(extra={"aliases": ("--exp",)})] = None
    """Experiment file, whose variables and framework are included."""
    assume: str | None = None
    """Assume another machine: MODEL or MODEL:GPUS, such as mi355x:8, or cpu."""
    assume_nic: str | None = None
    """NICs of the assumed machine: ainic, broadcom, mellanox or slingshot."""
    framework: str | None = None
    """Backend whose variables are included; defaults to that of --config."""
    nnodes: int | None = None
    """Number of nodes of the launch; several nodes need network variables."""


class MachineSummary(Struct, frozen=True, kw_only=True):
    """The machine that the variables are for."""

    host: str
    assumed: bool
    models: dict[str, int]
    """Number of devices by model."""
    architectures: list[str]
    devices: int
    """GPUs, or partitions of them."""
    nodes: int
    driver: str | None
    rocm: str | None
    cuda: str | None


class EnvironmentReport(Struct, frozen=True, kw_only=True):
    """Variables of a machine; secret values are redacted."""

    machine: MachineSummary
    variables: tuple[VariableChoice, ...]
    warnings: tuple[str, ...]
    network: Any
    """Network that `machine.network` chose, and what it excluded."""


def run(options: Options, context: TaskContext) -> None:
    """Print the variables.

    Raises:
        UsageError: The machine, the number of nodes or a user's variable is invalid.
    """
    if options.assume_nic is not None and options.assume is None:
        raise UsageError("--assume-nic describes an assumed machine", "add --assume MODEL")
    facts = build_assumed_machine(options.assume, options.assume_nic) if options.assume is not None else context.facts()
    given, workload = _read_experiment_variables(options.config, context)
    if options.framework is not None:
        workload = _build_workload(options.framework, workload)
    shape = _choose_layout(options, facts, context.layout)
    shell = context.environ if context.shell is None else context.shell
    shown = build_environment_report(facts, shape, shell, given, typed=context.variables, workload=workload)
    context.result(shown, _format_environment_report(shown))


def build_environment_report(
    facts: MachineFacts,
    layout: ClusterLayout,
    environ: Mapping[str, str],
    given: Mapping[str, Assignment],
    *,
    typed: Mapping[str, Assignment] | None = None,
    workload: JobWorkload | None = None,
) -> EnvironmentReport:
    """The environment of the processes of a machine.

    Raises:
        UsageError: A value contradicts deterministic mode, or gives an address instead of an interface name.
    """
    chosen = network.choose_network(facts, layout.nnodes, environ)
    node = JobNode(
        facts=facts,
        network=chosen,
        layout=layout,
        workload=workload,
        torch=find_torch_version(facts, sys.path),
        rocm_library=None if facts.assumed else find_rocm_library(environ),
    )
    decided = build_environment(node, GivenVariables(shell=environ, given=given, typed=(typed or {},)))
    return EnvironmentReport(
        machine=_describe_machine(facts, layout),
        variables=tuple(_redact_choice(choice) for choice in decided.variables.values()),
        warnings=decided.warnings,
        network=chosen,
    )


def _read_experiment_variables(
    file: str | None, context: TaskContext
) -> tuple[dict[str, Assignment], JobWorkload | None]:
    """Variables that an experiment file sets, with their lines, and the workload of its job."""
    if file is None:
        return {}, None
    from primus.experiment import build_workload  # checks of whole experiments take longer to import

    resolved = load_experiment(Path(file), (), environ=context.environ)
    given = {name: Variable(value, resolved.origins[f"env.{name}"]) for name, value in resolved.experiment.env.items()}
    return dict(given), build_workload(resolved.experiment)


def _build_workload(framework: str, of_file: JobWorkload | None) -> JobWorkload:
    """The workload of another framework.

    Raises:
        UsageError: The framework is unknown.
    """
    known = registry.list_plug_ins("frameworks")
    if framework not in known:
        raise UsageError(f"--framework: unknown framework '{framework}'", did_you_mean(framework, known))
    return structs.replace(of_file, framework=framework) if of_file else JobWorkload(framework=framework)


def _choose_layout(options: Options, facts: MachineFacts, layout: ClusterLayout | None) -> ClusterLayout:
    """The layout of the launch, or of the assumed machine, with the requested number of nodes."""
    if layout is None or options.assume is not None:
        layout = ClusterLayout(nproc=max(1, len(facts.partitions)), nnodes=layout.nnodes if layout else 1)
    if options.nnodes is None:
        return layout
    if options.nnodes < 1:
        raise UsageError(f"--nnodes {options.nnodes} is not a number of nodes", "use 1 or more")
    return structs.replace(layout, nnodes=options.nnodes)


def _redact_choice(choice: VariableChoice) -> VariableChoice:
    def hide(value: str | None, layer: str) -> str | None:
        format_value = hide_inherited_value if layer == "user" else redact_value
        return None if value is None else format_value(choice.name, value)

    lost = tuple(structs.replace(item, value=hide(item.value, item.layer)) for item in choice.overrode)
    return structs.replace(choice, value=hide(choice.value, choice.layer), overrode=lost)


def _describe_machine(facts: MachineFacts, layout: ClusterLayout) -> MachineSummary:
    software = facts.software
    return MachineSummary(
        host=facts.host,
        assumed=facts.assumed,
        models=dict(Counter(device.model or device.name or "unknown" for device in facts.devices)),
        architectures=sorted({device.architecture or "unknown" for device in facts.devices}),
        devices=len(facts.partitions) or len(facts.devices),
        nodes=layout.nnodes,
        driver=software.amd_driver or software.nvidia_driver,
        rocm=software.rocm,
        cuda=software.cuda,
    )


def _format_environment_report(shown: EnvironmentReport) -> str:
    parts = [_format_headline(shown.machine), _format_variable_table(shown.variables)]
    if shown.warnings:
        parts.append("\n".join(["warnings", *(f"  {warning}" for warning in shown.warnings)]))
    return "\n\n".join(parts)


def _format_variable_table(choices: Sequence[VariableChoice]) -> str:
    """One table with rows grouped by purpose."""
    if not choices:
        return "no variables"
    by_purpose = sorted(choices, key=lambda choice: ORDER.index(_find_purpose(choice.name)))
    rows = [
        [f"  {c.name}", _format_variable_value(c.value), _format_variable_source(c), _format_overridden_values(c)]
        for c in by_purpose
    ]
    header, *lines = format_rows(["  variable", "value", "from", "instead of"], rows)
    shown = [header]
    for purpose, group in groupby(zip(by_purpose, lines, strict=True), key=lambda pair: _find_purpose(pair[0].name)):
        shown += ["", purpose, *(line for _, line in group)]
    return "\n".join(shown)


def _format_headline(machine: MachineSummary) -> str:
    models = ", ".join(f"{count} x {model}" for model, count in machine.models.items()) or "no GPUs"
    details = [*machine.architectures, f"{machine.nodes} node{'s' * (machine.nodes > 1)}"]
    details += [f"{name} {version}" for name, version in (("rocm", machine.rocm), ("cuda", machine.cuda)) if version]
    details += ["assumed"] * machine.assumed
    return f"{models} ({', '.join(details)})"


def _find_purpose(name: str) -> str:
    """Purpose of a variable; the longest prefix wins: TORCH_NCCL_ is communication."""
    prefixes = {prefix: purpose for purpose, group in PURPOSES.items() for prefix in group if name.startswith(prefix)}
    return prefixes[max(prefixes, key=len)] if prefixes else OTHER


def _format_variable_value(value: str | None) -> str:
    return UNSET if value is None else value or '""'


def _format_variable_source(choice: VariableChoice) -> str:
    return choice.layer if choice.source == choice.layer else f"{choice.layer}: {choice.source}"


def _format_overridden_values(choice: VariableChoice) -> str:
    return ", ".join(f"{_format_variable_value(lost.value)} ({lost.layer})" for lost in choice.overrode)
