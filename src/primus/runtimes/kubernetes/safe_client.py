"""Workloads of Primus-SaFE through its REST API, for current servers and those from before 2026 (--api legacy)."""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from primus.errors import PrimusError, UsageError
from primus.redaction import MASK
from primus.runtime import JobState, SchedulerState
from primus.runtimes.kubernetes import volumes
from primus.runtimes.kubernetes.http_client import SafeServer, UncertainRequestError, check_url, quote_path_segment
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.safe_payload import build_node_script, build_workload_request
from primus.runtimes.kubernetes.target import (
    JobSpec,
    JobView,
    LogReader,
    NodeLabels,
    NodeView,
    Place,
    PodView,
    RequestRefused,
    SubmissionUncertain,
    Write,
)
from primus.web.retries import CLUSTER_PAUSES_S

PAGE = 100
NUM_LOG_LINES = 1000
"""Lines of a log per request, the server's own default."""
PHASES: dict[str, SchedulerState] = {
    "Pending": "queued",
    "Running": "running",
    "Updating": "running",
    "NotReady": "running",
    "Succeeded": "done",
    "Failed": "failed",
    "Stopped": "cancelled",
}


def resolve_place(options: Options, environ: Mapping[str, str]) -> Place:
    """Place in `options`.

    Raises:
        UsageError: --url is not an address.
    """
    found = {"target": "safe", "url": check_url(options.url or ""), "api": options.api}
    if options.workspace:
        found["workspace"] = options.workspace
    if options.token_file:
        found["token_file"] = str(Path(os.path.expanduser(options.token_file)).absolute())
    if options.api == "legacy":
        found["user"] = environ.get("PRIMUS_USER") or getpass.getuser()
    return found


def check(options: Options) -> None:
    """Reject options that Primus-SaFE does not support.

    Raises:
        UsageError: An option is not supported, missing or invalid.
    """
    check_url(options.url or "")
    for name in ("workspace", "image"):
        if not getattr(options, name):
            raise UsageError(f"kubernetes create --url needs --{name}")
    default = Options()
    for name, reason in _NOT_OURS.items():
        if getattr(options, name) != getattr(default, name):
            raise UsageError(f"--target safe does not support --{name.replace('_', '-')}: {reason}", "remove it")
    for volume in volumes.parse_volumes(options.volume):
        if volume.source != volume.path or volume.is_read_only:
            raise UsageError(
                f"--volume {volume.source}:{volume.path}: the workspace mounts its volumes itself",
                "use the folder at which it mounts one: --volume /shared:/shared",
            )
    if options.vendor == "nvidia":
        raise UsageError("--target safe does not support --vendor nvidia", "its clusters have AMD GPUs: remove it")
    if options.priority is not None and not 0 <= options.priority <= 2:
        raise UsageError(f"--priority {options.priority} is out of range", "use 0 to 2")
    if options.api == "legacy":
        _check_legacy(options)


_NOT_OURS = {
    "namespace": "a workspace has its own namespace (use --workspace)",
    "context": "the server is given by --url",
    "kubeconfig": "the server is given by --url",
    "rdma": "the server adds rdma/hca to jobs that use all GPUs of several nodes",
    "pull_secret": "a workspace has its own",
    "secret": "the server cannot set a variable from a secret; --env NAME sends the value of your shell",
    "queue": "the server has its own queue",
    "placement": "the server places its jobs",
    "priority_class": "use --priority",
    "service_account": "the server chooses it",
    "port": "the server chooses it",
    "grace": "the server stops a pod after 5 s",
}
"""Options that Primus-SaFE does not support, and why."""


def _check_legacy(options: Options) -> None:
    if len(options.usable_nodes) > 1:
        raise UsageError(
            f"--api legacy supports one node in --nodelist, not {len(options.usable_nodes)}",
            "use one node, or --exclude on a current server",
        )
    for name in ("exclude", "host_network", "priority", "shm"):
        if getattr(options, name) != getattr(Options(), name):
            raise UsageError(f"--api legacy does not support --{name.replace('_', '-')}", "remove it")


def format_job(job_spec: JobSpec, *, as_json: bool) -> str:
    """The request that `create` would send, with secrets masked."""
    masked = structs.replace(job_spec, secrets=dict.fromkeys(job_spec.secrets, MASK))
    body = build_workload_request(masked)
    if as_json:
        return json.dumps(body, indent=2)
    text = build_node_script(job_spec)
    lines = [f"POST {check_url(job_spec.options.url or '')}/api/v1/workloads"]
    for key in ("entryPoint", "entryPoints"):
        if key in body:
            body[key] = f"(the script below, {len(text)} bytes)"
    files = [f"#   {name}" for name in sorted(job_spec.files)]
    return "\n".join([*lines, json.dumps(body, indent=2), "", text.rstrip("\n"), "# with these files:", *files])


def create_job(job_spec: JobSpec, place: Place, environ: Mapping[str, str], say: Callable[[str], None]) -> str:
    """Create the workload; gives its id. After a lost answer, look for the workload before the next attempt.

    Raises:
        PrimusError: The server rejects it, or cannot be reached.
    """
    server = SafeServer(place, environ, hidden=tuple(job_spec.secrets.values()))
    body = build_workload_request(job_spec)
    problem: PrimusError | None = None
    # Three attempts. After a lost answer the delay gives the server time to list a created workload, which is then
    # found.
    for delay in (*CLUSTER_PAUSES_S[:2], 0.0):
        try:
            return str(server.post_json("/workloads", body)["workloadId"])
        except UncertainRequestError as error:
            # A request that is sent again at once could create the workload twice.
            problem = error
            time.sleep(delay)
            found = _find_workload(server, place, job_spec)
            if found:
                say("the response was lost, but the server has created the job")
                return found
        except (KeyError, TypeError):
            raise PrimusError(f"{place['url']}: the response has no workloadId", "check --api") from None
    assert problem
    hint = f"the job may exist: look for {job_spec.name} with 'kubernetes list' before you try again"
    raise SubmissionUncertain(problem.problem, hint)


def _find_workload(server: SafeServer, place: Place, job_spec: JobSpec) -> str | None:
    """Id of the workload of this run; its name contains the run's id, so it is unique."""
    for item in _list_workloads(server, place, description=f"primus run {job_spec.run_id}"):
        if item.get("displayName") == job_spec.name:
            return str(item["workloadId"])
    return None


def _list_workloads(server: SafeServer, place: Place, **query: object) -> Iterator[dict[str, Any]]:
    """All workloads of the server, page by page, the newest first."""
    offset = 0
    where = {"workspaceId": place.get("workspace"), **query}
    while True:
        # Newest first: a job that is created between two pages repeats an item, and hides none.
        answer = server.get_json("/workloads", **where, offset=offset, limit=PAGE, sortBy="creationTime", order="desc")
        items = _read_workload_page(server, answer)
        if not all("workloadId" in item for item in items):
            raise server.build_foreign_answer_error("not a list of workloads")
        yield from items
        offset += len(items)
        if not items or offset >= answer.get("totalCount", 0):
            return


def _read_workload_page(server: SafeServer, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Items of a page; null, which stands for an empty page, is an empty list.

    Raises:
        PrimusError: The response is not a page.
    """
    items = answer.get("items", "")
    if items is None:
        return []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise server.build_foreign_answer_error("not a list")
    return items


def find_states(place: Place, ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState]:
    """States of jobs; `gone` for a job that does not exist."""
    missing = set(ids)
    found = {}
    for item in _list_workloads(SafeServer(place, environ), place):
        if item["workloadId"] in missing:
            missing.remove(item["workloadId"])
            found[item["workloadId"]] = _read_job_state(item)
        # The jobs of a user are mostly recent: later pages are not read.
        if not missing:
            break
    return found | {each: JobState(state="gone", raw="NotFound", is_deleted=True) for each in missing}


def list_jobs(place: Place, environ: Mapping[str, str]) -> list[JobView]:
    """All jobs of the workspace, without their pods; newest last."""
    return [_build_job_view(item) for item in _list_workloads(SafeServer(place, environ), place)][::-1]


def get_job(place: Place, job: str, environ: Mapping[str, str]) -> JobView:
    """One job with its pods.

    Raises:
        UsageError: The job does not exist.
    """
    return _build_job_view(_get_workload(SafeServer(place, environ), job))


def _get_workload(server: SafeServer, job: str) -> dict[str, Any]:
    try:
        found = server.get_json(f"/workloads/{quote_path_segment(job)}")
    except RequestRefused as error:
        raise _build_missing_job_error(server, job, error) from None
    if "workloadId" not in found:
        raise server.build_foreign_answer_error("not a workload")
    return found


def _build_missing_job_error(server: SafeServer, job: str, error: RequestRefused) -> PrimusError:
    if error.status != 404:
        return error
    return UsageError(f"no job '{job}' at {server.url}", "to list jobs: kubernetes list --url URL")


def open_log_reader(place: Place, job: str, environ: Mapping[str, str], write: Write, tail: int | None) -> LogReader:
    """A reader of the log of a node."""
    return _SafeLogReader(SafeServer(place, environ), job, write, tail or NUM_LOG_LINES)


class _SafeLogReader:
    """Requests the last lines repeatedly, and writes the new ones; the server cannot stream."""

    def __init__(self, server: SafeServer, job: str, write: Write, num_lines: int) -> None:
        self._server = server
        self._job = job
        self._write = write
        self._num_lines = num_lines
        self._seen: list[str] = []

    def read(self, pod: str, *, follow: bool) -> None:
        path = f"/workloads/{quote_path_segment(self._job)}/pods/{quote_path_segment(pod)}/logs"
        # A response holds what is there now, also with `follow`: the caller asks again after its polling interval.
        answer = self._server.get_json(path, tailLines=self._num_lines)
        new = [str(line).rstrip("\n") for line in answer.get("logs") or []]
        # Without overlap, more than `num_lines` lines came between two requests, and those before `new` are lost.
        for line in new[_count_overlap(self._seen, new) :]:
            self._write(f"{line}\n")
        # Kept for the next request, which returns mostly the same lines.
        self._seen = new


def _count_overlap(seen: Sequence[str], new: Sequence[str]) -> int:
    """Number of lines at the head of `new` that are the last ones of `seen`."""
    # The longest overlap, because a repeated line would otherwise match too early.
    for length in range(min(len(seen), len(new)), 0, -1):
        if seen[-length:] == new[:length]:
            return length
    return 0


def delete_job(place: Place, job: str, environ: Mapping[str, str]) -> None:
    """Cancel and delete a job.

    Raises:
        UsageError: The job does not exist.
    """
    server = SafeServer(place, environ)
    try:
        server.delete_resource(f"/workloads/{quote_path_segment(job)}")
    except RequestRefused as error:
        raise _build_missing_job_error(server, job, error) from None


def read_node_labels(place: Place, environ: Mapping[str, str]) -> NodeLabels:
    """None: the server places the pods, and does not say where its nodes stand."""
    return NodeLabels()


def list_nodes(place: Place, environ: Mapping[str, str]) -> list[NodeView]:
    """The nodes of the workspace, or all nodes that the user may see, by name."""
    server = SafeServer(place, environ)
    answer = server.get_json("/nodes", workspaceId=place.get("workspace"), offset=0, limit=-1)
    return sorted((_build_node_view(item) for item in _read_workload_page(server, answer)), key=lambda node: node.name)


def _build_node_view(item: Mapping[str, Any]) -> NodeView:
    total, free = _count_gpus(item.get("totalResources")), _count_gpus(item.get("availResources"))
    return NodeView(
        name=str(item.get("nodeName") or item.get("nodeId") or ""),
        is_ready=bool(item.get("available")),
        gpus=total or 0,
        gpus_used=None if total is None or free is None else total - free,
        message=str(item.get("message") or ("" if item.get("available") else item.get("phase") or "")),
    )


def _count_gpus(resources: Mapping[str, Any] | None) -> int | None:
    amounts = [value for name, value in (resources or {}).items() if name.endswith("gpu")]
    return sum(int(value) for value in amounts) if amounts else None


def _build_job_view(item: Mapping[str, Any]) -> JobView:
    pods = tuple(
        sorted(map(_build_pod_view, item.get("pods") or ()), key=lambda pod: pod.rank if pod.rank is not None else -1)
    )
    described = str(item.get("description") or "").split()
    return JobView(
        id=str(item["workloadId"]),
        name=str(item.get("displayName") or ""),
        kind=str((item.get("groupVersionKind") or {}).get("kind") or ""),
        state=_read_job_state(item, pods),
        replicas=_count_replicas(item),
        created=str(item.get("creationTime") or ""),
        run=described[2] if described[:2] == ["primus", "run"] and len(described) == 3 else "",
        pods=pods,
        message=str(item.get("message") or ""),
    )


def _read_job_state(item: Mapping[str, Any], pods: Sequence[PodView] = ()) -> JobState:
    phase = str(item.get("phase") or "")
    state = PHASES.get(phase, "unknown")
    position = item.get("queuePosition")
    reason = f"position {position} in the queue" if state == "queued" and position else str(item.get("message") or "")
    codes = [pod.exit_code for pod in pods if pod.exit_code]
    return JobState(
        state=state,
        raw=phase,
        reason=reason,
        nodes=tuple(dict.fromkeys(pod.node for pod in pods if pod.node)),
        exit_code=codes[0] if codes and state == "failed" else 0 if state == "done" else None,
        # The first dispatch is the start, not a restart.
        restarts=max(0, int(item.get("dispatchCount") or 0) - 1),
    )


def _build_pod_view(item: Mapping[str, Any]) -> PodView:
    containers = item.get("containers") or ()
    codes = [each["exitCode"] for each in containers if each.get("exitCode") is not None]
    messages = [str(each["message"]) for each in containers if each.get("message")]
    rank = str(item.get("rank", ""))
    return PodView(
        name=str(item.get("podId") or ""),
        rank=int(rank) if rank.isdigit() else None,
        node=str(item.get("adminNodeName") or item.get("hostIP") or ""),
        phase=str(item.get("phase") or ""),
        exit_code=next((code for code in codes if code), codes[0] if codes else None),
        message=messages[0] if messages else "",
    )


def _count_replicas(item: Mapping[str, Any]) -> int | None:
    several = item.get("resources") or ([item["resource"]] if item.get("resource") else [])
    return sum(int(each.get("replica") or 0) for each in several) or None
