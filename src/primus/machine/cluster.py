"""Nodes and processes of a launch, from flags and from the variables that users and schedulers set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from primus.errors import UsageError

DEFAULT_PORT = 1234
"""Default port of the AMD-AGI/Primus launcher, which firewall rules of users allow."""
FIRST_JOB_PORT, NUM_JOB_PORTS = 20000, 10000
"""Ports of jobs that share nodes: below Linux's ephemeral ports (from 32768)."""

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables of a rank, which the launch sets; those of an outer launcher would mislead it."""


NODE_NAME_VARIABLE = "PRIMUS_NODE_NAME"
"""Name of the node where the host has another one, such as a pod; set by the runtime."""


def find_node_name() -> str:
    """Name of this node as its scheduler, or the user's list of hosts, knows it."""
    return os.environ.get(NODE_NAME_VARIABLE) or os.uname().nodename


class ClusterLayout(Struct, frozen=True, kw_only=True):
    """Rank and size of a launch as seen by this node."""

    nproc: int
    """Processes on this node."""
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int | None = None
    """Port of the rendezvous; None lets one node choose a free one."""
    sources: dict[str, str] = {}
    """Source of each value: a flag, a variable, or `default`."""

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    def make_rank_variables(self) -> dict[str, str]:
        """Variables of the only rank of this node among several nodes, as torchrun's agent sets them for each rank."""
        values = (self.node_rank, 0, self.node_rank, self.world_size, 1)
        master = {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port)}
        return dict(zip(RANK_VARIABLES, map(str, values), strict=True)) | master

    @property
    def master_of_several(self) -> str | None:
        """Address of node 0 if there are several nodes."""
        return self.master_addr if self.nnodes > 1 else None


class JobSize(Struct, frozen=True, kw_only=True):
    """What the options of a runtime ask for; None where they do not tell."""

    nodes: int | None = None
    devices_per_node: int | None = None


class LayoutFlags(Struct, frozen=True, kw_only=True):
    """What the user says about the layout on the command line."""

    nproc: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


NO_FLAGS = LayoutFlags()


def find_layout(environ: Mapping[str, str], devices: Callable[[], int], flags: LayoutFlags = NO_FLAGS) -> ClusterLayout:
    """The layout of this node; flags win over the user's variables, and these over the scheduler's.

    Variables: NNODES, NODE_RANK, GPUS_PER_NODE, MASTER_ADDR, MASTER_PORT, then PET_* (Kubeflow), then SLURM_*
    inside a job step, whose port comes from the job's number.

    Raises:
        UsageError: A variable is not a number, values contradict each other, or MASTER_ADDR is not a node of the step.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_NODEID" not in environ:
        environ = {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
    pick = _VariablePicker(environ)
    processes = pick.pick_number("nproc", flags.nproc, "GPUS_PER_NODE", "PET_NPROC_PER_NODE", "SLURM_GPUS_ON_NODE")
    nodes = pick.pick_number("nnodes", flags.nnodes, "NNODES", "PET_NNODES", "SLURM_STEP_NUM_NODES")
    shape = ClusterLayout(
        nproc=pick.pick_default("nproc", devices() or 1) if processes is None else processes,
        nnodes=pick.pick_default("nnodes", 1) if nodes is None else nodes,
        node_rank=pick.pick_number("node_rank", flags.node_rank, "NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID") or 0,
        master_addr=pick.pick_text("master_addr", flags.master_addr, "MASTER_ADDR", "PET_MASTER_ADDR")
        or _find_first_host(pick),
        master_port=pick.pick_number("master_port", flags.master_port, "MASTER_PORT", "PET_MASTER_PORT"),
        sources=pick.sources,
    )
    return _check_layout(
        _read_step_layout(shape, environ) if shape.sources.get("nnodes") == "$SLURM_STEP_NUM_NODES" else shape
    )


def _read_step_layout(shape: ClusterLayout, slurm: Mapping[str, str]) -> ClusterLayout:
    """`shape`, whose nodes are those of a job step, with a port of the job.

    Raises:
        UsageError: The shell still exports the address of another job's node.
    """
    if shape.nnodes < 2:
        return shape
    first = _parse_first_number(slurm.get("SLURM_STEP_NODELIST", ""))
    source = shape.sources.get("master_addr")
    if source in ("$MASTER_ADDR", "$PET_MASTER_ADDR") and first and not _is_possible_name(shape.master_addr, first):
        raise UsageError(
            f"{source}: {shape.master_addr} is not {first}, the first node of this job",
            f"unset {source[1:]} before submitting; to choose another address, use direct --master-addr",
        )
    port = _choose_job_port(slurm) if shape.master_port is None else None
    if port is None:
        return shape
    return structs.replace(shape, master_port=port, sources={**shape.sources, "master_port": "$SLURM_JOB_ID"})


def _is_possible_name(address: str, host: str) -> bool:
    """Whether `address` may belong to `host`: its name, with or without a domain, or any IP address."""
    is_number = ":" in address or re.fullmatch(r"[\d.]+", address) is not None
    return is_number or address.partition(".")[0].lower() == host.partition(".")[0].lower()


def _choose_job_port(slurm: Mapping[str, str]) -> int | None:
    """A port for a step of a job, so that successive jobs, steps and restarts use different ports."""
    texts = [slurm.get(name) or "0" for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    job = slurm.get("SLURM_JOB_ID", "")
    if not all(re.fullmatch(r"[0-9]+", text) for text in (job, *texts)):
        return None
    step, restart = map(int, texts)
    # Different primes for steps and restarts, so that neighboring jobs, steps and restarts on one node rarely share
    # a port.
    return FIRST_JOB_PORT + (int(job) + 1009 * step + 3001 * restart) % NUM_JOB_PORTS


def _check_layout(shape: ClusterLayout) -> ClusterLayout:
    sources = shape.sources
    if shape.nproc < 1 or shape.nnodes < 1:
        key = "nproc" if shape.nproc < 1 else "nnodes"
        raise UsageError(
            f"{sources[key]}: {getattr(shape, key)} is not a number of processes or nodes", "use 1 or more"
        )
    if not 0 <= shape.node_rank < shape.nnodes:
        where = sources.get("node_rank", "node rank")
        raise UsageError(
            f"{where}: node rank {shape.node_rank} of {shape.nnodes} nodes", f"use 0 to {shape.nnodes - 1}"
        )
    if shape.master_port is not None and not 0 < shape.master_port < 65536:
        raise UsageError(f"{sources['master_port']}: {shape.master_port} is not a port", "use 1024 to 65535")
    if shape.nnodes == 1:
        return shape
    if shape.master_addr == "localhost" and "master_addr" not in sources:
        raise UsageError(
            f"{shape.nnodes} nodes need the address of node 0", "give --master-addr, or set MASTER_ADDR, on every node"
        )
    if shape.master_port is None:
        return structs.replace(shape, master_port=DEFAULT_PORT, sources={**sources, "master_port": "default"})
    return shape


_LEFT_OPEN = {"PET_NPROC_PER_NODE": ("auto", "gpu")}
"""Values by which the Kubeflow operator leaves the choice to the launcher."""


class _VariablePicker:
    """Takes the first value that is set, and records its source."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.sources: dict[str, str] = {}

    def pick_text(self, key: str, flag: object, *variables: str) -> str | None:
        if flag is not None:
            self.sources[key] = "--" + key.replace("_", "-")
            return str(flag)
        for name in variables:
            if self.environ.get(name) and self.environ[name] not in _LEFT_OPEN.get(name, ()):
                self.sources[key] = f"${name}"
                return self.environ[name]
        return None

    def pick_number(self, key: str, flag: int | None, *variables: str) -> int | None:
        text = self.pick_text(key, flag, *variables)
        if text is None:
            return None
        if not re.fullmatch(r"-?\d+", text):
            raise UsageError(f"{self.sources[key]}: {text!r} is not a number")
        return int(text)

    def pick_default(self, key: str, value: int) -> int:
        self.sources.setdefault(key, "default")
        return value


_HOST = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_RANGES = re.compile(r"\[(\d+)[^\]]*\]")


def _find_first_host(pick: _VariablePicker) -> str:
    """First host of the job step's node list, as `scontrol show hostnames` would print it; localhost without one."""
    first = _parse_first_number(pick.environ.get("SLURM_STEP_NODELIST", ""))
    if not first or pick.environ.get("SLURM_STEP_NUM_NODES") == "1":
        return "localhost"
    pick.sources["master_addr"] = "$SLURM_STEP_NODELIST"
    return first


def _parse_first_number(nodes: str) -> str:
    match = _HOST.match(nodes)
    return _RANGES.sub(r"\1", match[0]) if match else ""
