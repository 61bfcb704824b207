"""Contract of the targets of the Kubernetes runtime.

A target is a module: `objects` (JobSet and TrainJob through the Kubernetes API) or `safe_client` (REST API of
Primus-SaFE). It has the functions of `KubernetesTarget`. A query takes a place only, so that a job can be found from
the record of its submission. A query that fails raises PrimusError with the server's message, and never changes a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from primus.errors import PrimusError
from primus.machine.placement.node_labels import locate_by_labels
from primus.runtime import JobState
from primus.runtimes.kubernetes.options import Options

Place = dict[str, str]
"""Location of jobs: `target` (jobset, trainjob, safe) with `url` (and `workspace`, `api`), or `kubeconfig`, `context`
and `namespace`. It is recorded with a submission, so it contains no secrets."""


class RequestRefused(PrimusError):
    """The server has rejected a request."""

    def __init__(self, problem: str, hint: str, status: int, asked_s: float | None = None) -> None:
        super().__init__(problem, hint)
        self.status = status
        self.asked_s = asked_s
        """Pause until the next attempt that the server requests."""


class SubmissionUncertain(PrimusError):
    """The job may have been created: the answer was lost."""


class JobSpec(Struct, frozen=True, kw_only=True):
    """A job to create."""

    options: Options
    """Options as typed. Read `env` and `secrets` below instead of its `env` and `hf_token`."""
    name: str
    """Name of the job: unique, a DNS label (RFC 1123) with room for the suffixes of its pods."""
    run_id: str
    directory: str
    """Run folder on this machine."""
    inside: str
    """Run folder in the pods."""
    command: tuple[str, ...]
    """Command of each pod: ``primus-cli direct -- train pretrain --run INSIDE``."""
    files: dict[str, str] = {}
    """Files of the run folder by relative path, which a pod copies to `inside` if that does not exist."""
    env: dict[str, str] = {}
    """Variables of the pods, without secrets and node ranks."""
    secrets: dict[str, str] = {}
    """Secret variables of the pods with their values: never shown, recorded or written to a file."""

    def __repr__(self) -> str:
        return f"JobSpec(name={self.name!r})"


class PodView(Struct, frozen=True, kw_only=True):
    """A pod of a job."""

    name: str
    rank: int | None = None
    """Rank of its node."""
    node: str = ""
    phase: str = ""
    exit_code: int | None = None
    restarts: int = 0
    message: str = ""
    """Why it is waiting, or how it ended."""


class JobView(Struct, frozen=True, kw_only=True):
    """A job, as reported by its server."""

    id: str
    name: str = ""
    kind: str = ""
    """JobSet, TrainJob, or Primus-SaFE's kind."""
    state: JobState
    replicas: int | None = None
    created: str = ""
    """As the server writes it."""
    run: str = ""
    """Id of its run, if the server stores it."""
    pods: tuple[PodView, ...] = ()
    message: str = ""
    """Newest message of the server, such as why the job is waiting."""


class NodeView(Struct, frozen=True, kw_only=True):
    """A node of the cluster."""

    name: str
    is_ready: bool
    is_cordoned: bool = False
    """Whether it accepts no new pods, by order of an operator."""
    gpus: int = 0
    """GPUs that jobs can use."""
    gpus_used: int | None = None
    """None if the server does not report it."""
    model: str = ""
    """Model of its GPUs, from its labels."""
    message: str = ""
    """Why the node is not ready, or accepts no jobs."""


class NodeLabels(Struct, frozen=True, kw_only=True):
    """The labels of the cluster's nodes."""

    nodes: dict[str, dict[str, str]] = {}
    """Labels by the name of the node."""
    topologies: list[list[str]] = []
    """Labels that Kueue takes as levels of the network, outermost first, without the node itself."""

    def locate_nodes(self) -> dict[str, tuple[str, ...]]:
        """The switches above each node that says where it stands, outermost first."""
        places = {node: locate_by_labels(labels, self.topologies) for node, labels in self.nodes.items()}
        return {node: place for node, place in places.items() if place}


Write = Callable[[str], None]


class LogReader(Protocol):
    """The log of a node."""

    def read(self, pod: str, *, follow: bool) -> None:
        """Write the new lines of `pod`; with `follow`, the reader may also wait for further lines."""


class KubernetesTarget(Protocol):
    """The functions of a target's module."""

    def resolve_place(self, options: Options, environ: Mapping[str, str]) -> Place:
        """Place in `options`; UsageError with a hint if no cluster is configured. Opens no connection."""

    def check(self, options: Options) -> None:
        """UsageError for options that this target does not support; no option is ignored. No side effects."""

    def format_job(self, job_spec: JobSpec, *, as_json: bool) -> str:
        """The request that `create` would send, as text or JSON, without secrets. No side effects."""

    def create_job(
        self, job_spec: JobSpec, place: Place, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> str:
        """Create the job; gives its id. After a failure, deletes the objects that it has created."""

    def find_states(self, place: Place, ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState]:
        """States of jobs; `gone` for a job that does not exist."""

    def list_jobs(self, place: Place, environ: Mapping[str, str]) -> list[JobView]:
        """All jobs, without their pods; newest last."""

    def get_job(self, place: Place, job: str, environ: Mapping[str, str]) -> JobView:
        """One job with its pods; UsageError if it does not exist."""

    def open_log_reader(
        self, place: Place, job: str, environ: Mapping[str, str], write: Write, tail: int | None
    ) -> LogReader:
        """A reader that passes the lines of a node's log to `write`, with newlines, starting with the last `tail`."""

    def delete_job(self, place: Place, job: str, environ: Mapping[str, str]) -> None:
        """Cancel a job and delete the objects created for it; UsageError if it does not exist."""

    def read_node_labels(self, place: Place, environ: Mapping[str, str]) -> NodeLabels:
        """Labels of the nodes that say where they stand; empty for a server that places its jobs itself."""

    def list_nodes(self, place: Place, environ: Mapping[str, str]) -> list[NodeView]:
        """The nodes of the cluster, by name."""
