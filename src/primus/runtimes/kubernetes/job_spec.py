"""A planned task as the order of a job: its name, the run folder inside the pods, what they do and their variables."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from primus import registry
from primus.errors import UsageError
from primus.launch import run_folder
from primus.launch.jobs import submissions
from primus.launch.plan import LaunchPlan, PlanContext
from primus.launch.run_remote import RemoteLaunch
from primus.launch.variables import check_name, is_name
from primus.redaction import redact_value
from primus.runtime import RUNTIMES
from primus.runtimes.kubernetes import volumes
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.target import JobSpec

LONGEST_LABEL = 63
"""RFC 1123; the name of a pod is its host name."""
SAFE_LABEL = 44
"""Longest name of a PyTorchJob of Primus-SaFE: 63 less the 5 random characters and the dash of a generated name, less
the 13 of its pods (MaxPytorchJobNameLen in SaFE/common/pkg/utils/utils.go of AMD-AGI/Primus-SaFE). Its webhook refuses
longer ones, and those of a single character (DisplayNameRule in SaFE/webhooks/pkg/utils.go)."""
NO_VOLUME = PurePosixPath("/primus/output")
"""Where run folders are that end with their pod."""
LEFT_HERE = ("launch.", submissions.RECORD)
"""How the names of files of a run folder begin that are about this machine."""
LARGEST_FILE_BYTES = 1 << 20
"""A larger file of a run folder is no configuration."""


def build_job_spec(remote: RemoteLaunch, options: Options, files: Mapping[str, str]) -> JobSpec:
    """The job that `remote` asks for, with `files` in its run folder."""
    inside = locate_run_folder_in_pod(options, remote.context)
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


def pod_command(options: Options, context: PlanContext) -> tuple[str, ...]:
    """What a pod does: the rest of the chain, by the image's own `primus-cli` in the run folder as it is called there.

    Raises:
        UsageError: The rest of the chain would start a container in the pod.
    """
    _, *words = context.there
    runtimes = [word for word in words if not word.startswith("--")]
    if registry.load_plug_in(RUNTIMES, runtimes[0]).LEVEL != "node":
        raise UsageError(
            f"the pod is the container: '{runtimes[0]}' cannot run inside 'kubernetes'",
            "leave it out, and name its image: kubernetes create --image IMAGE -- <task>",
        )
    inside = str(locate_run_folder_in_pod(options, context))
    return (options.entry, *(inside if word == context.directory else word for word in words))


def locate_run_folder_in_pod(options: Options, context: PlanContext) -> PurePosixPath:
    """The run folder as the pods see it: the same path below a volume for writing, else one below the first."""
    here = PurePosixPath(context.directory)
    above = [volume for volume in volumes.parse_volumes(options.volume) if here.is_relative_to(volume.path)]
    if above and not max(above, key=lambda volume: len(volume.path)).is_read_only:
        return here
    first = next((PurePosixPath(volume.path) for volume in volumes.list_writable_volumes(options.volume)), NO_VOLUME)
    return first / context.name / here.name


def collect_pod_variables(
    options: Options, plan: LaunchPlan, context: PlanContext
) -> tuple[dict[str, str], dict[str, str]]:
    """Variables of the pods, and the secret ones among them apart.

    Raises:
        UsageError: A name is none, or has no value here.
    """
    found = {name: variable.value for name, variable in plan.env.items()}
    hidden = {name for name, variable in plan.env.items() if variable.is_secret}
    for word in options.env:
        name, has_value, value = word.partition("=")
        check_name(name, "--env")
        if has_value:
            found[name] = value
        elif name not in found:
            found[name] = _read_shell_variable(name, context.environ)
    referenced = set(secret_references(options))
    if context.environ.get("HF_TOKEN"):
        found.setdefault("HF_TOKEN", context.environ["HF_TOKEN"])
    found = {name: value for name, value in found.items() if name not in referenced}
    secrets = {name: value for name, value in found.items() if name in hidden or redact_value(name, value) != value}
    return {name: value for name, value in found.items() if name not in secrets}, secrets


def _read_shell_variable(name: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise UsageError(f"--env {name}: this shell has no such variable", "--env NAME=VALUE, or set it")
    return environ[name]


def secret_references(options: Options) -> dict[str, tuple[str, str]]:
    """Variables that come from Secrets which exist: the Secret's name and key.

    Raises:
        UsageError: A word is not NAME=SECRET/KEY.
    """
    found = {}
    for word in options.secret:
        name, _, reference = word.partition("=")
        secret, _, key = reference.partition("/")
        if not (is_name(name) and secret and key):
            raise UsageError(
                "--secret takes NAME=SECRET/KEY: a variable, and the Secret and the key that hold its value"
            )
        found[name] = (secret, key)
    return found


def job_name(options: Options, name: str, run_id: str) -> str:
    """The name of a job, unique by its run where none was typed; what is no label of DNS is made one.

    The longest name that is made of it is that of a pod: JOB-node-0-NUMBER-abcde; Primus-SaFE has a limit of its own.
    """
    is_safe = options.target_name == "safe"
    longest = SAFE_LABEL if is_safe else LONGEST_LABEL - len(f"-node-0-{options.replica - 1}-abcde")
    if options.name is None:
        suffix = _format_dns_label(run_id)
        return f"{_format_dns_label(name)[: longest - len(suffix) - 1].strip('-') or 'run'}-{suffix}"
    slug = _format_dns_label(options.name)
    if slug and slug == options.name and 1 + is_safe <= len(slug) <= longest:
        return slug
    digest = hashlib.sha256(options.name.encode()).hexdigest()[:6]
    return f"{slug[: longest - 7].strip('-') or 'run'}-{digest}"


def _format_dns_label(text: str) -> str:
    """`text` in lower case, digits and dashes; it begins with a letter, as the name of a Service must (RFC 1035)."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return plain if not plain or plain[0].isalpha() or re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", plain) else f"p{plain}"


def planned_files(remote: RemoteLaunch) -> dict[str, str]:
    """Files of the run folder as a dry run shows them: those that would be made, or are there already."""
    if remote.job.resume:
        return existing_files(remote)
    return run_folder.format_files(Path(remote.directory), remote.job, remote.request, remote.command)


def existing_files(remote: RemoteLaunch) -> dict[str, str]:
    """What a node needs of the run folder that was made here: what was asked, not what was done.

    Raises:
        UsageError: A file of it is no text, or too large.
    """
    directory = Path(remote.directory)
    named = [directory / name for name in remote.job.files]
    found = {*named, *directory.glob("*.json"), *(directory / "config").rglob("*")}
    kept = sorted(path for path in found if path.is_file() and not path.name.startswith(LEFT_HERE))
    return {str(path.relative_to(directory)): _read_text_file(path) for path in kept}


def _read_text_file(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise UsageError(f"{path}: too large to be sent along with a job", "put it where the pods find it")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text, so it cannot be sent along with a job") from None
