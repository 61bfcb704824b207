"""Build the spec of a job from a planned task: name, run folder in the pods, command and variables."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from msgspec import structs

from primus import registry
from primus.errors import UsageError
from primus.launch import run_folder
from primus.launch.jobs import submissions
from primus.launch.variables import check_name, is_name, name_typed_variables
from primus.plan import LaunchPlan, PlanContext, Variable
from primus.runtime import RUNTIMES, RemoteLaunch
from primus.runtimes.kubernetes import volumes
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.target import JobSpec

LONGEST_LABEL = 63
"""RFC 1123; the name of a pod is also its host name."""
SAFE_LABEL = 44
"""Longest name of a PyTorchJob of Primus-SaFE: 63 less the 5 random characters and the dash of a generated name, less
the 13 of its pods (MaxPytorchJobNameLen in SaFE/common/pkg/utils/utils.go of AMD-AGI/Primus-SaFE). Its webhook refuses
longer ones, and those of a single character (DisplayNameRule in SaFE/webhooks/pkg/utils.go)."""
NO_VOLUME = PurePosixPath("/primus/output")
"""Folder of run folders that are deleted with their pod."""
LOCAL_FILES = ("launch.", submissions.RECORD)
"""Prefixes of files in a run folder that are not sent, because they concern this machine."""
LARGEST_FILE_BYTES = 1 << 20
"""Maximum size of a file that is sent: that of a whole ConfigMap."""


def build_job_spec(remote: RemoteLaunch, options: Options, files: Mapping[str, str]) -> JobSpec:
    """The spec of the job for `remote`, with `files` in its run folder."""
    inside = locate_run_folder_in_pod(options, remote.context)
    options = structs.replace(options, exclude=(*options.exclude, *remote.plan.avoided))
    env, secrets = collect_pod_variables(options, remote.plan, remote.context)
    return JobSpec(
        options=options,
        name=job_name(options, remote.context.name, Path(remote.directory).name),
        run_id=Path(remote.directory).name,
        directory=remote.directory,
        inside=str(inside),
        command=remote.plan.argv,
        files=dict(files),
        env=env,
        secrets=secrets,
    )


def build_pod_command(options: Options, context: PlanContext) -> tuple[str, ...]:
    """Command of a pod: the rest of the command line, with `primus-cli` and the run folder at their paths in the pod.

    Raises:
        UsageError: The rest would start a container in the pod.
    """
    # `there` is the command line of a node with paths of this machine; entry and run folder have others in the pod.
    _, *words = context.there
    runtimes = [word for word in words if not word.startswith("--")]
    if registry.load_plug_in(RUNTIMES, runtimes[0]).LEVEL != "node":
        raise UsageError(
            f"'{runtimes[0]}' cannot run inside 'kubernetes': the pod is the container",
            f"remove '{runtimes[0]}', and set the image of the pod: kubernetes create --image IMAGE -- <task>",
        )
    inside = str(locate_run_folder_in_pod(options, context))
    return (options.entry, *(inside if word == context.directory else word for word in words))


def locate_run_folder_in_pod(options: Options, context: PlanContext) -> PurePosixPath:
    """Path of the run folder in the pods: the same path if a writable volume covers it, else below the first volume."""
    here = PurePosixPath(context.directory)
    above = [volume for volume in volumes.parse_volumes(options.volume) if here.is_relative_to(volume.path)]
    # The deepest mount is the one that a pod sees at this path.
    if above and not max(above, key=lambda volume: len(volume.path)).is_read_only:
        return here
    first = next((PurePosixPath(volume.path) for volume in volumes.list_writable_volumes(options.volume)), NO_VOLUME)
    return first / context.name / here.name


def collect_pod_variables(
    options: Options, plan: LaunchPlan, context: PlanContext
) -> tuple[dict[str, str], dict[str, str]]:
    """Variables of the pods: those without secrets, and the secret ones.

    Raises:
        UsageError: A name is invalid, or the variable is not set.
    """
    found = dict(plan.env)
    # After those of the plan, so that --env wins.
    for word in options.env:
        name, has_value, value = word.partition("=")
        check_name(name, "--env")
        if has_value:
            found[name] = Variable(value, "--env")
        elif name not in found:
            found[name] = _read_shell_variable(name, context.environ)
    found |= name_typed_variables(found)
    # A variable from an existing Secret must not be sent as well: the literal value would be in the manifest.
    referenced = set(list_secret_references(options))
    # Pods have no login of the Hub, and a tokenizer may need one; it becomes a Secret below.
    if context.environ.get("HF_TOKEN"):
        found.setdefault("HF_TOKEN", _read_shell_variable("HF_TOKEN", context.environ))
    # A variable of the shell becomes a Secret unless its value is known to be harmless.
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for name, variable in found.items():
        if name not in referenced:
            (env if variable.format_value(name) == variable.value else secrets)[name] = variable.value
    return env, secrets


def _read_shell_variable(name: str, environ: Mapping[str, str]) -> Variable:
    if name not in environ:
        raise UsageError(f"--env {name}: the variable is not set", "set it, or write --env NAME=VALUE")
    return Variable(environ[name], "--env", is_inherited=True)


def list_secret_references(options: Options) -> dict[str, tuple[str, str]]:
    """Variables from existing Secrets: name and key of the Secret.

    Raises:
        UsageError: A value is not NAME=SECRET/KEY.
    """
    found = {}
    for word in options.secret:
        name, _, reference = word.partition("=")
        secret, _, key = reference.partition("/")
        if not (is_name(name) and secret and key):
            raise UsageError(f"--secret {word}: expected NAME=SECRET/KEY", "for example --secret HF_TOKEN=hub/token")
        found[name] = (secret, key)
    return found


def job_name(options: Options, name: str, run_id: str) -> str:
    """The name of a job, as a DNS label; by default unique, since it contains the run's id.

    The longest derived name is that of a pod: JOB-node-0-NUMBER-abcde. Primus-SaFE has its own limit.
    """
    is_safe = options.target_name == "safe"
    longest = SAFE_LABEL if is_safe else LONGEST_LABEL - len(f"-node-0-{options.replica - 1}-abcde")
    # The suffix is never cut: two runs of one experiment differ only by it.
    if options.name is None:
        suffix = _format_dns_label(run_id)
        return f"{_format_dns_label(name)[: longest - len(suffix) - 1].strip('-') or 'run'}-{suffix}"
    slug = _format_dns_label(options.name)
    if slug and slug == options.name and 1 + is_safe <= len(slug) <= longest:
        return slug
    # Two names that become the same label, such as `a.b` and `a-b`, stay different jobs by the digest.
    digest = hashlib.sha256(options.name.encode()).hexdigest()[:6]
    return f"{slug[: longest - 7].strip('-') or 'run'}-{digest}"


def _format_dns_label(text: str) -> str:
    """`text` as lower-case letters, digits and dashes; it starts with a letter, as a Service name must (RFC 1035)."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return plain if not plain or plain[0].isalpha() or re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", plain) else f"p{plain}"


def list_planned_files(remote: RemoteLaunch) -> dict[str, str]:
    """Files of the run folder for a dry run: those that would be created, or exist already."""
    if remote.job.resume:
        return read_existing_files(remote)
    return run_folder.format_files(Path(remote.directory), remote.job, remote.request, remote.command)


def read_existing_files(remote: RemoteLaunch) -> dict[str, str]:
    """Files of the run folder that a node needs: the request and the configuration, without logs and results.

    Raises:
        UsageError: A file is not text, or too large.
    """
    directory = Path(remote.directory)
    named = [directory / name for name in remote.job.files]
    found = {*named, *directory.glob("*.json"), *(directory / "config").rglob("*")}
    kept = sorted(path for path in found if path.is_file() and not path.name.startswith(LOCAL_FILES))
    return {str(path.relative_to(directory)): _read_text_file(path) for path in kept}


def _read_text_file(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise UsageError(f"{path} is too large to send with a job", "put it on a volume of the pods")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text and cannot be sent with a job", "put it on a volume") from None
