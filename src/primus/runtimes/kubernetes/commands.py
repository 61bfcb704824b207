"""Commands of the Kubernetes runtime that need no task: get, list, logs, delete, nodes, wait."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, NamedTuple, cast

from primus.errors import EXIT_FAILED, EXIT_OK, EXIT_TIMED_OUT, PrimusError, UsageError
from primus.launch.jobs import job_states, submissions
from primus.runtime import JobState, Submission
from primus.runtimes.kubernetes import status
from primus.runtimes.kubernetes.options import JOB_COMMANDS, Options
from primus.runtimes.kubernetes.target import JobView, KubernetesTarget, NodeView, Place, RequestRefused
from primus.task import TaskContext

POLL_S = 2.0
"""Pause between two queries of `wait` and `logs --follow`: lines appear soon, with 30 requests a minute at most."""
SERVER_ERROR = HTTPStatus.INTERNAL_SERVER_ERROR
"""Status from which an answer is a fault of the server, which may be transient; those below are rejections."""
MODULES = {"jobset": "objects", "trainjob": "objects", "safe": "safe_client"}


def load_target(name: str) -> KubernetesTarget:
    """The target `name`."""
    return cast(KubernetesTarget, importlib.import_module(f"primus.runtimes.kubernetes.{MODULES[name]}"))


def run(options: Options, context: TaskContext) -> int:
    """Run a command; gives the exit code.

    Raises:
        UsageError: No job is given, or it does not exist.
        PrimusError: The server rejects the request, or cannot be reached.
    """
    if options.command in JOB_COMMANDS and not options.job_id:
        raise UsageError(f"kubernetes {options.command} needs the name of a job", "to list jobs: kubernetes list")
    if options.command == "create":
        raise UsageError("kubernetes create needs a task", "write create --exp FILE, or create [options] -- <task>")
    if context.dry_run:
        context.result(
            {"command": options.command, "target": options.target_name, "job": options.job_id},
            f"would send to {options.url or 'the Kubernetes API'}: {options.command} {options.job_id}".rstrip(),
        )
        return EXIT_OK
    place = resolve_job_place(options, context.environ)
    return {
        "get": _print_job,
        "list": _print_jobs,
        "logs": _print_job_logs,
        "delete": _delete_job,
        "nodes": _print_nodes,
        "wait": _wait_for_job,
    }[options.command](load_target(place["target"]), place, options, context)


def resolve_job_place(options: Options, environ: Mapping[str, str]) -> Place:
    """Place of the job in `options`: from the options, else from the record of its submission."""
    typed = (options.url, options.target, options.namespace, options.context, options.kubeconfig, options.workspace)
    known = submissions.list_submissions(environ) if options.job_id and not any(typed) else []
    recorded = [each for each in known if each.runtime == "kubernetes" and each.id == options.job_id]
    if recorded:
        return dict(recorded[-1].place)
    place = load_target(options.target_name).resolve_place(options, environ)
    # A job whose kind is not given is looked up under each kind that the cluster has.
    is_open = options.job_id and options.target is None and MODULES[place["target"]] == "objects"
    return _find_place_of_job(place, options.job_id, environ) if is_open else place


def _find_place_of_job(place: Place, job: str, environ: Mapping[str, str]) -> Place:
    """`place` with the kind of the job; the default kind if no job has this name."""
    for kind in (name for name, module in MODULES.items() if module == "objects"):
        candidate = {**place, "target": kind}
        with suppress(UsageError, RequestRefused):  # no such job, or the cluster does not have this kind
            load_target(kind).get_job(candidate, job, environ)
            return candidate
    return place


def _print_job(server: KubernetesTarget, place: Place, options: Options, context: TaskContext) -> int:
    view = server.get_job(place, options.job_id, context.environ)
    context.result(view, _format_job(view))
    return EXIT_OK


def _print_jobs(server: KubernetesTarget, place: Place, options: Options, context: TaskContext) -> int:
    views = (
        _list_jobs_of_all_kinds(place, context) if options.target is None else server.list_jobs(place, context.environ)
    )
    rows = [
        (
            each.id,
            each.kind or "-",
            each.state.state,
            each.state.raw,
            _format_or_dash(each.replicas),
            str(each.state.restarts),
            each.run,
            each.created,
        )
        for each in views
    ]
    head = ("JOB", "KIND", "STATE", "STATUS", "NODES", "RESTARTS", "RUN", "CREATED")
    context.result(
        views, _format_columns(head, rows) if rows else f"no jobs in {place.get('namespace') or place.get('url')}"
    )
    return EXIT_OK


def _list_jobs_of_all_kinds(place: Place, context: TaskContext) -> list[JobView]:
    """The jobs of all kinds that primus creates at `place`; kinds that the cluster does not have are skipped.

    Raises:
        PrimusError: The server cannot be reached, or rejects the requests for all kinds.
    """
    kinds = [name for name, module in MODULES.items() if module == MODULES[place["target"]]]
    found: list[JobView] = []
    refused: list[RequestRefused] = []
    for kind in kinds:
        try:
            found += load_target(kind).list_jobs({**place, "target": kind}, context.environ)
        except RequestRefused as error:
            if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN):
                raise
            refused.append(error)
    if len(refused) == len(kinds):
        raise refused[0]
    for each in refused:
        if each.status == HTTPStatus.FORBIDDEN:
            context.say(f"skipped: {each.problem}")
    return sorted(found, key=lambda view: (view.created, view.id))


def _print_job_logs(server: KubernetesTarget, place: Place, options: Options, context: TaskContext) -> int:
    write_log(
        server, place, options.job_id, context.environ, LogRequest(options.rank or 0, options.follow, options.tail)
    )
    return EXIT_OK


class LogRequest(NamedTuple):
    """What is wanted of a node's log."""

    rank: int = 0
    """The node."""
    follow: bool = False
    """Whether new lines are wanted too, across restarts, until the job ends."""
    tail: int | None = None
    """Number of last lines; None for all."""


def write_log(
    server: KubernetesTarget, place: Place, job: str, environ: Mapping[str, str], request: LogRequest
) -> None:
    """Print the log of a node.

    Raises:
        UsageError: The job or the node does not exist.
    """
    rank, follow, tail = request
    reader = server.open_log_reader(place, job, environ, _write_to_stdout, tail)
    outage = _OutageTolerance()
    # A restart replaces the pods, so each round looks for the node's newest pod; the reader writes each line once.
    while True:
        with outage.tolerate_outage():
            view = server.get_job(place, job, environ)
            if view.replicas is not None and not 0 <= rank < view.replicas:
                raise UsageError(f"job '{job}' has no node {rank}", f"use --rank 0 to {view.replicas - 1}")
            pod = status.find_newest_pod(view.pods, rank)
            # Decided before reading: lines that arrive after a final state was seen are read in this round.
            is_over = not follow or view.state.state in job_states.ENDED
            if pod is not None:
                reader.read(pod.name, follow=not is_over)
            elif not follow:
                reason = view.message or view.state.reason or view.state.raw
                raise UsageError(f"node {rank} of '{job}' has no pod: {reason}", f"for details: kubernetes get {job}")
            if is_over:
                return
        time.sleep(POLL_S)


class _OutageTolerance:
    """Retries a server that has responded once, and reports each new problem.

    A problem before the first response is an error at once, since it is most likely a wrong address or account. After
    it, a rolling upgrade of the control plane or a lost network may take minutes, while the job runs on.
    """

    def __init__(self) -> None:
        self._has_responded = False
        self._problem = ""

    @contextmanager
    def tolerate_outage(self) -> Iterator[None]:
        """Run one round of requests; stop the round if the server is unhealthy or out of reach."""
        try:
            yield
        except PrimusError as error:
            is_refusal = isinstance(error, UsageError) or (
                isinstance(error, RequestRefused) and error.status < SERVER_ERROR
            )
            # A rejection is final: the same request would be rejected again.
            if is_refusal or not self._has_responded:
                raise
            if error.problem != self._problem:
                print(f"{error.problem}; retrying", file=sys.stderr, flush=True)
            self._problem = error.problem
        else:
            self._has_responded, self._problem = True, ""


def _write_to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _delete_job(server: KubernetesTarget, place: Place, options: Options, context: TaskContext) -> int:
    if not options.yes and sys.stdin.isatty():
        context.say(f"delete {options.job_id}, its pods and the objects that were created for it? [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            context.say("nothing was deleted")
            return EXIT_FAILED
    # Recorded only after the server has accepted it: `jobs list` must not report a job as cancelled that runs.
    server.delete_job(place, options.job_id, context.environ)
    for submission in _find_submissions(options.job_id, place, context.environ):
        job_states.record_end(submission, JobState(state="cancelled", raw="deleted"))
    context.result({"deleted": options.job_id}, f"deleted {options.job_id}")
    return EXIT_OK


def _print_nodes(server: KubernetesTarget, place: Place, options: Options, context: TaskContext) -> int:
    views = server.list_nodes(place, context.environ)
    rows = [_format_node_row(each) for each in views]
    context.result(views, _format_columns(("NODE", "READY", "GPUS", "USED", "MODEL", "MESSAGE"), rows))
    return EXIT_OK


def _format_node_row(node: NodeView) -> tuple[str, ...]:
    ready = "yes" if node.is_ready else "no"
    return (node.name, ready, str(node.gpus), _format_or_dash(node.gpus_used), node.model or "-", node.message)


SERVER = ("url", "kubeconfig", "context", "namespace")
"""Keys of a place that identify the server; two servers may have jobs of the same id."""


def _find_submissions(job: str, place: Place, environ: Mapping[str, str]) -> list[Submission]:
    """The newest record of a submission of `job` at `place`, or an empty list."""

    def is_meant(each: Submission) -> bool:
        is_there = all(each.place.get(key) == place.get(key) for key in SERVER)
        return (each.runtime, each.id) == ("kubernetes", job) and is_there

    return [each for each in submissions.list_submissions(environ) if is_meant(each)][-1:]


def _wait_for_job(server: KubernetesTarget, place: Place, options: Options, context: TaskContext) -> int:
    """Wait until the job ends; gives the exit code of its run, or 124 after --timeout."""
    with job_states.detach_on_signal(
        options.job_id, f"kubernetes delete {options.job_id}", _print_to_stderr
    ) as waiting:
        waiting.exit_code = _poll_until_ended(server, place, options, context)
    return waiting.exit_code


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _poll_until_ended(server: KubernetesTarget, place: Place, options: Options, context: TaskContext) -> int:
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    outage, shown = _OutageTolerance(), ""
    # Each round queries the state once. An outage ends the round early and keeps what was known.
    while True:
        with outage.tolerate_outage():
            state = _query_job_state(server, place, options, context, was_there=bool(shown))
            if state.state in job_states.ENDED:
                context.result(state, f"{options.job_id}: {_format_state(state)}")
                # A job that was submitted from this machine has a run folder, whose outcome is more precise than the
                # job's state.
                known = _find_submissions(options.job_id, place, context.environ)
                if not known:
                    return job_states.find_exit_code_of_job(state)
                job_states.record_end(known[0], state)
                return job_states.report_end(known[0], state, _print_to_stderr)
            text = ": ".join(filter(None, (state.raw, state.reason, state.advice)))
            if text != shown:
                shown = text
                print(f"{options.job_id}: {text}", file=sys.stderr, flush=True)
        # Checked after the query, so that `--timeout 0` queries once.
        if deadline is not None and time.monotonic() >= deadline:
            print(f"primus-cli: {options.job_id} is still {shown}", file=sys.stderr)
            return EXIT_TIMED_OUT
        time.sleep(POLL_S if deadline is None else max(0.0, min(POLL_S, deadline - time.monotonic())))


def _query_job_state(
    server: KubernetesTarget, place: Place, options: Options, context: TaskContext, *, was_there: bool
) -> JobState:
    try:
        return server.get_job(place, options.job_id, context.environ).state
    except UsageError as error:
        if was_there:
            # Not a usage error any more: the job existed in an earlier round.
            problem = f"{options.job_id} was deleted while waiting for it"
            raise RequestRefused(problem, error.hint, HTTPStatus.NOT_FOUND) from None
        raise


def _format_job(view: JobView) -> str:
    lines = [f"job:      {view.id}", f"state:    {_format_state(view.state)}"]
    lines += [f"run:      {view.run}"] if view.run else []
    lines += [f"nodes:    {_format_or_dash(view.replicas)}", f"restarts: {view.state.restarts}"]
    lines += [f"created:  {view.created}"] if view.created else []
    lines += [f"message:  {view.message}"] if view.message else []
    rows = [
        (_format_or_dash(pod.rank), pod.name, pod.phase, pod.node or "-", _format_or_dash(pod.exit_code), pod.message)
        for pod in view.pods
    ]
    return "\n".join(
        [*lines, "", _format_columns(("RANK", "POD", "PHASE", "NODE", "EXIT", "MESSAGE"), rows)] if rows else lines
    )


def _format_state(state: JobState) -> str:
    raw = f" ({state.raw})" if state.raw and state.raw.lower() != state.state else ""
    code = f", exit code {state.exit_code}" if state.exit_code is not None else ""
    return f"{state.state}{raw}{code}" + (f": {state.reason}" if state.reason else "")


def _format_or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _format_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)
