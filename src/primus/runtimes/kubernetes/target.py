"""What every target of the Kubernetes runtime gives, and what it is given.

A target is a module: `objects` (JobSet and TrainJob through the Kubernetes API) or `safe` (Primus-SaFE's REST API). It
has the functions of `Target`. Each query is given its place alone, so that a job is found again from what was
remembered of its submission. A query that fails raises PrimusError with the server's own message; it never changes a
job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from primus.errors import PrimusError
from primus.launch.jobs.job_states import JobState
from primus.runtimes.kubernetes.options import Options

Place = dict[str, str]
"""Where jobs are: `target` (jobset, trainjob, safe) with `url` (and `workspace`, `api`), or `kubeconfig`, `context` and
`namespace`. It is kept with a submission, so it holds no secrets."""


class RequestRefused(PrimusError):
    """The server has refused a request."""

    def __init__(self, problem: str, hint: str, status: int) -> None:
        super().__init__(problem, hint)
        self.status = status


class SubmissionUncertain(PrimusError):
    """The job may have been made, though that could not be heard."""


class JobSpec(Struct, frozen=True, kw_only=True):
    """A task that is to become a job."""

    options: Options
    """As they were typed; `env` and `hf_token` are not to be read here: their values are in `env` and `secrets`."""
    name: str
    """What the job is called: unique, lower case, a label of DNS (RFC 1123) with room for the names of its pods."""
    run_id: str
    directory: str
    """Run folder here."""
    inside: str
    """Run folder as the pods see it."""
    command: tuple[str, ...]
    """What each pod does: ``primus-cli direct -- train pretrain --run INSIDE``."""
    files: dict[str, str] = {}
    """Files of the run folder by relative path, to be copied to `inside` where it does not exist."""
    env: dict[str, str] = {}
    """Variables of the pods; no secrets, and none that tells a node its place among the others."""
    secrets: dict[str, str] = {}
    """Secret variables of the pods and their values: never shown, kept or put where people see them."""

    def __repr__(self) -> str:
        return f"Order(name={self.name!r})"


class PodView(Struct, frozen=True, kw_only=True):
    """A pod of a job."""

    name: str
    rank: int | None = None
    """Number of its node among the job's."""
    node: str = ""
    phase: str = ""
    exit_code: int | None = None
    restarts: int = 0
    message: str = ""
    """Why it waits, or ended."""


class JobView(Struct, frozen=True, kw_only=True):
    """A job as its server tells."""

    id: str
    name: str = ""
    kind: str = ""
    """JobSet, TrainJob, or Primus-SaFE's kind."""
    state: JobState
    replicas: int | None = None
    created: str = ""
    """As the server writes it."""
    run: str = ""
    """Id of its run, where the server knows it."""
    pods: tuple[PodView, ...] = ()
    message: str = ""
    """The last thing that the server says of it, such as why it waits."""


class NodeView(Struct, frozen=True, kw_only=True):
    """A node of the cluster."""

    name: str
    is_ready: bool
    gpus: int = 0
    """That jobs may have."""
    gpus_used: int | None = None
    """None where the server does not tell."""
    model: str = ""
    """Of its GPUs, as its labels say."""
    message: str = ""
    """Why it is not ready, or takes no jobs."""


Write = Callable[[str], None]


class LogReader(Protocol):
    """The log of a node."""

    def read(self, pod: str, *, follow: bool) -> None:
        """Write the lines of `pod` that are new; with `follow` maybe also those that come."""


class KubernetesTarget(Protocol):
    """The functions of a target's module."""

    def resolve_place(self, options: Options, environ: Mapping[str, str]) -> Place:
        """Where `options` say; UsageError with a hint where there is no cluster. Opens no connection."""

    def check(self, options: Options) -> None:
        """UsageError for options that this target cannot honour; nothing that was typed is ignored. Pure."""

    def format_job(self, order: JobSpec, *, as_json: bool) -> str:
        """What `create` would send, for people or for another program, secrets left out. Pure."""

    def create_job(self, order: JobSpec, place: Place, environ: Mapping[str, str], say: Callable[[str], None]) -> str:
        """Start the job; gives its id. What it has made is removed again where it fails half way."""

    def states(self, place: Place, ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState]:
        """How jobs stand; `gone` for one that is not there."""

    def list_jobs(self, place: Place, environ: Mapping[str, str]) -> list[JobView]:
        """All jobs, without their pods; newest last."""

    def get_job(self, place: Place, job: str, environ: Mapping[str, str]) -> JobView:
        """One job with its pods; UsageError where there is none."""

    def open_log_reader(
        self, place: Place, job: str, environ: Mapping[str, str], write: Write, tail: int | None
    ) -> LogReader:
        """What gives the lines of the log of one node to `write`, each with its newline; at first the last `tail`."""

    def delete_job(self, place: Place, job: str, environ: Mapping[str, str]) -> None:
        """End a job and remove what was made for it; UsageError where there is none."""

    def list_nodes(self, place: Place, environ: Mapping[str, str]) -> list[NodeView]:
        """The nodes of the cluster, by name."""
