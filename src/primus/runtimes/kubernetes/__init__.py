"""Run on Kubernetes (short name: k8s)."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from msgspec import structs

from primus.errors import EXIT_OK, PrimusError, UsageError
from primus.launch.jobs import job_states, submissions
from primus.launch.nodes.avoided_nodes import AvoidedNodes, choose_among, plan_avoided_nodes, report_avoided_nodes
from primus.launch.run_remote import SubmissionRejected
from primus.launch.signals import find_exit_code
from primus.machine.cluster import JobSize
from primus.machine.placement.node_labels import locate_by_labels
from primus.machine.placement.node_place import LEAST_ORDERED, PLACE_VARIABLE, TOPOLOGY_VARIABLE
from primus.messages import Say
from primus.plan import BindMount, LaunchPlan, PlanContext, Variable
from primus.redaction import redact_args
from primus.runs.files import UNFIT_NODES_VARIABLE, write_text
from primus.runs.run_progress import RunProgress
from primus.runs.store import Run, RunOutcome
from primus.runs.unfit_nodes import is_same_node
from primus.runtime import JobState, RemoteLaunch, Submission
from primus.runtimes.kubernetes import job_spec, node_script, placement, volumes
from primus.runtimes.kubernetes.cluster_nodes import collect_output, list_nodes, select_node
from primus.runtimes.kubernetes.commands import LogRequest, load_target, run, write_log
from primus.runtimes.kubernetes.options import COMMANDS, REFERENCES, Options, accepts_option, parse, split_words
from primus.runtimes.kubernetes.target import KubernetesTarget, Place, SubmissionUncertain

__all__ = ["COMMANDS", "LEVEL", "REFERENCES", "Options", "cancel", "format_plan", "parse", "print_logs", "run"]
__all__ += ["accepts_option", "find_own_place", "find_states", "post_progress", "split_words", "start", "wrap"]
__all__ += ["collect_output", "list_nodes", "select_node"]

LEVEL = "cluster"
DELETED = JobState(state="cancelled", raw="deleted")
FOLDER = "kubernetes"
"""Folder in the run folder with the job as it was sent, and its node script."""
TOPOLOGY_FILE = "config/topology.csv"
"""Places of the cluster's nodes at the submission, in the run folder."""


def wrap(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    """`plan` as the command of each pod of a job.

    Raises:
        UsageError: An option is invalid, or not supported by the target.
    """
    if options.exp is not None:
        raise UsageError("--exp cannot be combined with a task after ' -- '", "remove one of them")
    load_target(options.target_name).check(options)
    job_spec.collect_pod_variables(options, plan, context)
    mounts = [
        BindMount(volume.source, volume.path, volume.is_read_only) for volume in volumes.parse_volumes(options.volume)
    ]
    avoided = _plan_avoided_nodes(options, context)
    has_place = volumes.list_writable_volumes(options.volume)
    notes = () if has_place else ("without --volume the run folder is deleted with its pod",)
    return structs.replace(
        plan,
        argv=job_spec.build_pod_command(options, context),
        mounts=tuple(mounts),
        files={**plan.files, f"{context.directory}/{FOLDER}/{node_script.SCRIPT}": node_script.TEXT},
        env=plan.env | _pass_list(options, context),
        avoided=avoided.avoided,
        notes=(*plan.notes, *notes, *avoided.notes),
        inner=plan,
    )


def _plan_avoided_nodes(options: Options, context: PlanContext) -> AvoidedNodes:
    """What the job does about unfit nodes, without a query; --nodelist is the choice that it has."""
    listed = context.find_unfit_nodes(options.unfit_nodes)
    if listed is None or (options.target_name == "safe" and options.api == "legacy"):  # it cannot exclude nodes
        return AvoidedNodes()
    found = plan_avoided_nodes(listed, excluded=options.excluded_nodes)
    if not options.allowed_nodes:
        return found
    return found.merge(choose_among(found.avoided, options.usable_nodes, options.replica))


def _pass_list(options: Options, context: PlanContext) -> dict[str, Variable]:
    """The variable with the list's folder for the pods, which write to it, if one of their volumes holds it."""
    folder = options.unfit_nodes or context.environ.get(UNFIT_NODES_VARIABLE)
    shared = volumes.list_writable_volumes(options.volume)
    if not folder or not any(PurePosixPath(folder).is_relative_to(volume.path) for volume in shared):
        return {}
    return {UNFIT_NODES_VARIABLE: Variable(folder, "--unfit-nodes" if options.unfit_nodes else "the shell")}


def _avoid_unfit_nodes(
    remote: RemoteLaunch, options: Options, server: KubernetesTarget, place: Place, run: Run, say: Say
) -> RemoteLaunch:
    """`remote` without unfit nodes, as far as the cluster has enough others; a user may not be allowed to list them."""
    found = AvoidedNodes(avoided=remote.plan.avoided)
    if not found.avoided:
        return remote
    with contextlib.suppress(PrimusError):
        views = server.list_nodes(place, remote.context.environ)
        needs_gpus = options.gpu > 0 and any(each.gpus for each in views)  # not every server reports them
        usable = [each.name for each in views if each.is_ready and (each.gpus or not needs_gpus)]
        allowed = [name for name in usable if not options.allowed_nodes or name in options.allowed_nodes]
        left = [name for name in allowed if name not in options.excluded_nodes]
        chosen = choose_among(found.avoided, left, options.replica)
        others = {
            name: why
            for name, why in found.avoided.items()
            if not any(is_same_node(name, each) for each in chosen.used)
        }
        found = structs.replace(chosen, avoided=others | chosen.avoided)
    report_avoided_nodes(found, run, say)
    return structs.replace(remote, plan=structs.replace(remote.plan, avoided=found.avoided))


def _apply_node_labels(
    remote: RemoteLaunch, options: Options, server: KubernetesTarget, place: Place, run: Run, say: Say
) -> RemoteLaunch:
    """`remote` with a file of the nodes' places on the network for node 0, as far as the user may read their labels.

    Raises:
        UsageError: The nodes have labels, and none is that of `--placement`.
    """
    typed = {word.partition("=")[0] for word in options.env} | set(remote.plan.env)
    is_ordered = options.replica >= LEAST_ORDERED and not typed & {TOPOLOGY_VARIABLE, PLACE_VARIABLE}
    is_level = placement.is_level(options.placement)
    if not is_ordered and not is_level:
        return remote
    try:
        labels = server.read_node_labels(place, remote.context.environ)
    except PrimusError as error:
        without = [f"--placement {options.placement} is not checked"] if is_level else []
        without += ["labels of the nodes do not order the ranks, unless the pods may read them"] if is_ordered else []
        say(f"{', and '.join(without)}: {error.problem}")
        return remote
    if is_level:
        placement.check_level(options, labels)
    places = labels.locate_nodes()
    if not is_ordered or not places:
        return remote
    write_text(run.directory / TOPOLOGY_FILE, "".join(f"{','.join((node, *at))}\n" for node, at in places.items()))
    inside = job_spec.locate_run_folder_in_pod(options, remote.context) / TOPOLOGY_FILE
    env = remote.plan.env | {TOPOLOGY_VARIABLE: Variable(str(inside), "the labels of the nodes")}
    return structs.replace(remote, plan=structs.replace(remote.plan, env=env))


def format_plan(remote: RemoteLaunch) -> str:
    """Output of a dry run: the objects that would be sent to the server, as text for kubectl."""
    options = parse(remote.request.runtimes[0].words)
    wanted = job_spec.build_job_spec(remote, options, job_spec.list_planned_files(remote))
    text = load_target(options.target_name).format_job(wanted, as_json=remote.is_json)
    avoided = [f"avoids {name}, which is unfit: {why}" for name, why in remote.plan.avoided.items()]
    notes = [] if remote.is_json else [f"# {note}" for note in (*remote.plan.notes, *avoided)]
    return "\n".join([*notes, text])


def start(remote: RemoteLaunch, run_folder: Run | None, say: Say) -> int:
    """Create the job on the server, and record it; gives the exit code.

    Raises:
        PrimusError: The server rejects it, or cannot be reached; objects that were created are deleted.
    """
    assert run_folder is not None, "the plan has a file"
    options, environ = parse(remote.request.runtimes[0].words), remote.context.environ
    server = load_target(options.target_name)
    # Three ends: rejected, and the caller removes the run folder; uncertain or interrupted, and the folder stays with
    # the reason, since the job may exist; created, and the submission is recorded.
    try:
        place = server.resolve_place(options, environ)
        remote = _avoid_unfit_nodes(remote, options, server, place, run_folder, say)
        remote = _apply_node_labels(remote, options, server, place, run_folder, say)
        wanted = job_spec.build_job_spec(remote, options, job_spec.read_existing_files(remote))
        write_text(run_folder.directory / FOLDER / "job.txt", server.format_job(wanted, as_json=False) + "\n")
        identity = server.create_job(wanted, place, environ, say)
    except SubmissionUncertain as error:
        outcome = RunOutcome(state="failed", exit_code=error.exit_code, reason=error.problem)
        run_folder.update_metadata(ended=time.time(), outcome=outcome)
        raise
    except PrimusError as error:
        raise SubmissionRejected.from_error(error) from None
    except KeyboardInterrupt as error:
        outcome = RunOutcome(
            state="interrupted", exit_code=find_exit_code(error), reason="interrupted during the submission"
        )
        run_folder.update_metadata(ended=time.time(), outcome=outcome)
        raise
    submissions.remember_submission(
        Submission(
            runtime="kubernetes",
            id=identity,
            name=remote.context.name,
            directory=remote.directory,
            submitted=time.time(),
            host=socket.gethostname(),
            user=getpass.getuser(),
            command=tuple(redact_args(remote.command)),
            place=place,
            logs=(),
        ),
        environ,
        say,
    )
    for note in remote.plan.notes:
        say(f"note: {note}")
    say(f"job {identity} is created; to see its log: primus-cli kubernetes logs {identity} --follow")
    return EXIT_OK


def find_size(options: Options) -> JobSize:
    """A node for each replica, with its GPUs."""
    return JobSize(nodes=options.replica, devices_per_node=options.gpu or None)


def find_states(submissions: Sequence[Submission]) -> dict[str, JobState]:
    """States of jobs, by id, with one query per place."""
    found: dict[str, JobState] = {}
    for place in {tuple(sorted(each.place.items())): each.place for each in submissions}.values():
        ids = [each.id for each in submissions if each.place == place]
        found |= load_target(place["target"]).find_states(place, ids, os.environ)
    return found


def cancel(submission: Submission) -> None:
    """Delete a job and the objects that were created for it, and record the end of its run."""
    load_target(submission.place["target"]).delete_job(submission.place, submission.id, os.environ)
    # After the deletion: if the server rejects it, the run still belongs to a job that may be running.
    job_states.record_end(submission, DELETED)


def post_progress(progress: RunProgress, target: str, environ: Mapping[str, str]) -> None:
    """Post the progress of a run, in its first pod."""
    from primus.runtimes.kubernetes import progress as progress_post

    progress_post.post_progress(progress, target, environ)


def find_own_place(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The switches above the node of this pod, by the node's labels.

    Raises:
        PrimusError: The account of the pod may not read them.
    """
    from primus.runtimes.kubernetes.pod_account import read_own_labels

    return locate_by_labels(read_own_labels(environ))


def print_logs(submission: Submission, follow: bool, tail: int | None) -> None:
    """Print the log of node 0."""
    place = submission.place
    write_log(load_target(place["target"]), place, submission.id, os.environ, LogRequest(0, follow, tail))
