"""Workloads of Primus-SaFE through its REST API, of servers from before and after it took a list of resources."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from primus.errors import PrimusError, UsageError
from primus.launch.jobs import JobState, State
from primus.redaction import MASK
from primus.runtimes.kubernetes import volumes
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.rest import DELAYS_S, Server, Uncertain, checked_url, segment
from primus.runtimes.kubernetes.safe_payload import payload, script
from primus.runtimes.kubernetes.target import JobView, NodeView, Order, Place, Pod, Reader, Refused, Unsure, Write

PAGE = 100
NUM_LOG_LINES = 1000
"""Lines of a log that are asked for at once, as the server does by itself."""
PHASES: dict[str, State] = {
    "Pending": "queued",
    "Running": "running",
    "Updating": "running",
    "NotReady": "running",
    "Succeeded": "done",
    "Failed": "failed",
    "Stopped": "cancelled",
}


def place(options: Options, environ: Mapping[str, str]) -> Place:
    """Where `options` say.

    Raises:
        UsageError: --url is no address.
    """
    found = {"target": "safe", "url": checked_url(options.url or ""), "api": options.api}
    if options.workspace:
        found["workspace"] = options.workspace
    if options.token_file:
        found["token_file"] = str(Path(options.token_file).expanduser().absolute())
    if options.api == "legacy":
        found["user"] = environ.get("PRIMUS_USER") or getpass.getuser()
    return found


def check(options: Options) -> None:
    """Refuse what Primus-SaFE cannot honour.

    Raises:
        UsageError: There is such an option, or one is missing or wrong.
    """
    checked_url(options.url or "")
    for name in ("workspace", "image"):
        if not getattr(options, name):
            raise UsageError(f"kubernetes create --url needs --{name}")
    default = Options()
    for name, reason in _NOT_OURS.items():
        if getattr(options, name) != getattr(default, name):
            raise UsageError(f"--target safe has no --{name.replace('_', '-')}: {reason}", "leave it out")
    for volume in volumes.parsed(options.volume):
        if volume.source != volume.path or volume.is_read_only:
            raise UsageError(
                f"--volume {volume.source}:{volume.path}: a workspace mounts its volumes itself",
                "name the folder where it does: --volume /shared:/shared",
            )
    if options.vendor == "nvidia":
        raise UsageError("--target safe has no --vendor nvidia", "its clusters are AMD's")
    if options.priority is not None and not 0 <= options.priority <= 2:
        raise UsageError(f"--priority {options.priority}: use 0 to 2")
    if options.api == "legacy":
        _check_legacy(options)


_NOT_OURS = {
    "namespace": "a workspace has its own (--workspace)",
    "context": "it is reached by its URL",
    "kubeconfig": "it is reached by its URL",
    "rdma": "it adds rdma/hca to jobs of several nodes with all GPUs",
    "pull_secret": "a workspace has its own",
    "secret": "it cannot set a variable from a secret; --env NAME sends the value of your shell",
    "queue": "it has its own queue",
    "priority_class": "use --priority",
    "service_account": "it has its own",
    "port": "it chooses the port",
    "grace": "it gives a pod 5 s to end",
}
"""Options that Primus-SaFE cannot honour, and why."""


def _check_legacy(options: Options) -> None:
    if len(options.usable_nodes) > 1:
        raise UsageError(
            f"--api legacy: an old server keeps one node of --nodelist, not {len(options.usable_nodes)}",
            "name one, or use --exclude on a current server",
        )
    for name in ("exclude", "host_network", "priority", "shm"):
        if getattr(options, name) != getattr(Options(), name):
            raise UsageError(f"--api legacy has no --{name.replace('_', '-')}", "leave it out")


def shown(order: Order, *, as_json: bool) -> str:
    """What `create` would send; values of secrets are masked."""
    body = payload(order)
    body["env"] = body["env"] | dict.fromkeys(order.secrets, MASK)
    if as_json:
        return json.dumps(body, indent=2)
    text = script(order)
    lines = [f"POST {checked_url(order.options.url or '')}/api/v1/workloads"]
    for key in ("entryPoint", "entryPoints"):
        if key in body:
            body[key] = f"(the script below, {len(text)} bytes)"
    files = [f"#   {name}" for name in sorted(order.files)]
    return "\n".join([*lines, json.dumps(body, indent=2), "", text.rstrip("\n"), "# with these files:", *files])


def create(order: Order, place: Place, environ: Mapping[str, str], say: Callable[[str], None]) -> str:
    """Start the workload; gives its id. Where no answer came it is looked up before it is asked for again.

    Raises:
        PrimusError: The server refuses it, or cannot be reached.
    """
    server = Server(place, environ, hidden=tuple(order.secrets.values()))
    body = payload(order)
    problem: PrimusError | None = None
    for delay in (*DELAYS_S[:2], 0.0):
        try:
            return str(server.post("/workloads", body)["workloadId"])
        except Uncertain as error:
            problem = error
            time.sleep(delay)
            found = _find(server, place, order)
            if found:
                say("the server gave no answer, but has made the job")
                return found
        except (KeyError, TypeError):
            raise PrimusError(f"{place['url']}: the answer has no workloadId", "is --api right?") from None
    assert problem
    hint = f"it may be there all the same: look for {order.name} with 'kubernetes list' before you try again"
    raise Unsure(problem.problem, hint)


def _find(server: Server, place: Place, order: Order) -> str | None:
    """Id of the workload that was made for `order`, whose name has the run's id and is given once."""
    for item in _items(server, place, description=f"primus run {order.run_id}"):
        if item.get("displayName") == order.name:
            return str(item["workloadId"])
    return None


def _items(server: Server, place: Place, **query: object) -> Iterator[dict[str, Any]]:
    """All workloads that the server lists, page by page, the newest first."""
    offset = 0
    where = {"workspaceId": place.get("workspace"), **query}
    while True:
        answer = server.get("/workloads", **where, offset=offset, limit=PAGE, sortBy="creationTime", order="desc")
        items = _listed(server, answer)
        if not all("workloadId" in item for item in items):
            raise server.foreign("no list of workloads")
        yield from items
        offset += len(items)
        if not items or offset >= answer.get("totalCount", 0):
            return


def _listed(server: Server, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a page lists; an empty one may have `null` there.

    Raises:
        PrimusError: It is no page.
    """
    items = answer.get("items", "")
    if items is None:
        return []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise server.foreign("no list")
    return items


def states(place: Place, ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState]:
    """How jobs stand; `gone` for one that is not there."""
    missing = set(ids)
    found = {}
    for item in _items(Server(place, environ), place):
        if item["workloadId"] in missing:
            missing.remove(item["workloadId"])
            found[item["workloadId"]] = _state(item)
        if not missing:
            break
    return found | {each: JobState(state="gone", raw="NotFound", is_deleted=True) for each in missing}


def jobs(place: Place, environ: Mapping[str, str]) -> list[JobView]:
    """All jobs of the workspace, without their pods; newest last."""
    return [_view(item) for item in _items(Server(place, environ), place)][::-1]


def get(place: Place, job: str, environ: Mapping[str, str]) -> JobView:
    """One job with its pods.

    Raises:
        UsageError: There is none.
    """
    return _view(_workload(Server(place, environ), job))


def _workload(server: Server, job: str) -> dict[str, Any]:
    try:
        found = server.get(f"/workloads/{segment(job)}")
    except Refused as error:
        raise _no_job(server, job, error) from None
    if "workloadId" not in found:
        raise server.foreign("no workload")
    return found


def _no_job(server: Server, job: str, error: Refused) -> PrimusError:
    if error.status != 404:
        return error
    return UsageError(f"no job '{job}' at {server.url}", "'kubernetes list --url URL' shows them")


def reader(place: Place, job: str, environ: Mapping[str, str], write: Write, tail: int | None) -> Reader:
    """What writes the log of a node."""
    return _Reader(Server(place, environ), job, write, tail or NUM_LOG_LINES)


class _Reader:
    """Asks for the last lines again and again, and writes those that are new."""

    def __init__(self, server: Server, job: str, write: Write, num_lines: int) -> None:
        self._server = server
        self._job = job
        self._write = write
        self._num_lines = num_lines
        self._seen: list[str] = []

    def read(self, pod: str, *, follow: bool) -> None:
        path = f"/workloads/{segment(self._job)}/pods/{segment(pod)}/logs"
        answer = self._server.get(path, tailLines=self._num_lines)
        new = [str(line).rstrip("\n") for line in answer.get("logs") or []]
        for line in new[_overlap(self._seen, new) :]:
            self._write(f"{line}\n")
        self._seen = new


def _overlap(seen: Sequence[str], new: Sequence[str]) -> int:
    """How many lines at the head of `new` are the last ones of `seen`."""
    for length in range(min(len(seen), len(new)), 0, -1):
        if seen[-length:] == new[:length]:
            return length
    return 0


def delete(place: Place, job: str, environ: Mapping[str, str]) -> None:
    """End a job and remove it.

    Raises:
        UsageError: There is none.
    """
    server = Server(place, environ)
    try:
        server.delete(f"/workloads/{segment(job)}")
    except Refused as error:
        raise _no_job(server, job, error) from None


def nodes(place: Place, environ: Mapping[str, str]) -> list[NodeView]:
    """The nodes of the workspace, else all that the user may see, by name."""
    server = Server(place, environ)
    answer = server.get("/nodes", workspaceId=place.get("workspace"), offset=0, limit=-1)
    return sorted((_node(item) for item in _listed(server, answer)), key=lambda node: node.name)


def _node(item: Mapping[str, Any]) -> NodeView:
    total, free = _gpus(item.get("totalResources")), _gpus(item.get("availResources"))
    return NodeView(
        name=str(item.get("nodeName") or item.get("nodeId") or ""),
        is_ready=bool(item.get("available")),
        gpus=total or 0,
        gpus_used=None if total is None or free is None else total - free,
        message=str(item.get("message") or ("" if item.get("available") else item.get("phase") or "")),
    )


def _gpus(resources: Mapping[str, Any] | None) -> int | None:
    amounts = [value for name, value in (resources or {}).items() if name.endswith("gpu")]
    return sum(int(value) for value in amounts) if amounts else None


def _view(item: Mapping[str, Any]) -> JobView:
    pods = tuple(sorted(map(_pod, item.get("pods") or ()), key=lambda pod: pod.rank if pod.rank is not None else -1))
    described = str(item.get("description") or "").split()
    return JobView(
        id=str(item["workloadId"]),
        name=str(item.get("displayName") or ""),
        kind=str((item.get("groupVersionKind") or {}).get("kind") or ""),
        state=_state(item, pods),
        replicas=_replicas(item),
        created=str(item.get("creationTime") or ""),
        run=described[2] if described[:2] == ["primus", "run"] and len(described) == 3 else "",
        pods=pods,
        message=str(item.get("message") or ""),
    )


def _state(item: Mapping[str, Any], pods: Sequence[Pod] = ()) -> JobState:
    phase = str(item.get("phase") or "")
    state = PHASES.get(phase, "unknown")
    position = item.get("queuePosition")
    reason = f"number {position} in the queue" if state == "queued" and position else str(item.get("message") or "")
    codes = [pod.exit_code for pod in pods if pod.exit_code]
    return JobState(
        state=state,
        raw=phase,
        reason=reason,
        nodes=tuple(dict.fromkeys(pod.node for pod in pods if pod.node)),
        exit_code=codes[0] if codes and state == "failed" else 0 if state == "done" else None,
        restarts=max(0, int(item.get("dispatchCount") or 0) - 1),
    )


def _pod(item: Mapping[str, Any]) -> Pod:
    containers = item.get("containers") or ()
    codes = [each["exitCode"] for each in containers if each.get("exitCode") is not None]
    said = [str(each["message"]) for each in containers if each.get("message")]
    rank = str(item.get("rank", ""))
    return Pod(
        name=str(item.get("podId") or ""),
        rank=int(rank) if rank.isdigit() else None,
        node=str(item.get("adminNodeName") or item.get("hostIP") or ""),
        phase=str(item.get("phase") or ""),
        exit_code=next((code for code in codes if code), codes[0] if codes else None),
        message=said[0] if said else "",
    )


def _replicas(item: Mapping[str, Any]) -> int | None:
    several = item.get("resources") or ([item["resource"]] if item.get("resource") else [])
    return sum(int(each.get("replica") or 0) for each in several) or None
