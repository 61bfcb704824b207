"""Build the request for a job on Primus-SaFE, and the script that every pod runs."""

from __future__ import annotations

import base64
import gzip
import io
import shlex
import tarfile
from collections.abc import Mapping

from primus.errors import UsageError
from primus.runtimes.kubernetes import node_script
from primus.runtimes.kubernetes.target import JobSpec

LARGEST_ENTRY_BYTES = 128 * 1024 - 1
"""Maximum of the encoded script: it may become one argument of a program (execve(2), MAX_ARG_STRLEN)."""
MEMORY = "1024Gi"
EPHEMERAL_STORAGE = "100Gi"
TTL_S = 36000
"""As in examples/run_k8s_pretrain.sh of AMD-AGI/Primus; the server's default is 60 s."""
MAX_RETRIES = 3


def build_workload_request(job_spec: JobSpec) -> dict[str, object]:
    """The body of the request; its variables contain the values of secrets.

    Raises:
        UsageError: The script is too large.
    """
    return _build_legacy_request(job_spec) if job_spec.options.api == "legacy" else _build_current_request(job_spec)


def _build_current_request(job_spec: JobSpec) -> dict[str, object]:
    """A PyTorchJob with a master, and with workers if there are several nodes; all lists have the same length."""
    options = job_spec.options
    counts = [1] if options.replica == 1 else [1, options.replica - 1]
    body = _build_common_fields(job_spec) | {
        "workspaceId": options.workspace,
        "groupVersionKind": {"kind": "PyTorchJob", "version": "v1"},
        "images": [options.image] * len(counts),
        "entryPoints": [_encode_script(job_spec)] * len(counts),
        "resources": [_build_pod_resources(job_spec, count) for count in counts],
        "isSupervised": False,
        "timeout": 0,
    }
    body |= {"priority": options.priority} if options.priority is not None else {}
    body |= {"forceHostNetwork": True} if options.host_network else {}
    if options.usable_nodes:
        return body | {"specifiedNodes": list(options.usable_nodes), "nodesAffinity": "required"}
    return body | ({"excludedNodes": list(options.excluded_nodes)} if options.excluded_nodes else {})


def _build_legacy_request(job_spec: JobSpec) -> dict[str, object]:
    options = job_spec.options
    usable = options.usable_nodes
    labels = {"customerLabels": {"kubernetes.io/hostname": usable[0]}} if usable else {}
    return _build_common_fields(job_spec) | {
        "workspace": options.workspace,
        "groupVersionKind": {"group": "kubeflow.org", "kind": "PyTorchJob", "version": "v1"},
        "image": options.image,
        "entryPoint": f"echo {_encode_script(job_spec)} | base64 -d >/tmp/primus-entry.sh && sh /tmp/primus-entry.sh",
        "resource": _build_pod_resources(job_spec, options.replica),
        **labels,
    }


def _build_common_fields(job_spec: JobSpec) -> dict[str, object]:
    options = job_spec.options
    return {
        "displayName": job_spec.name,
        "description": f"primus run {job_spec.run_id}",
        "env": {**job_spec.env, **job_spec.secrets},
        "maxRetry": MAX_RETRIES if options.max_restarts is None else options.max_restarts,
        "ttlSecondsAfterFinished": TTL_S if options.ttl is None else options.ttl,
    }


def _build_pod_resources(job_spec: JobSpec, count: int) -> dict[str, object]:
    """Resources of each of `count` pods; the server's default for shared memory is half the memory."""
    options = job_spec.options
    amounts = {"replica": count, "cpu": options.cpu, "gpu": str(options.gpu), "memory": options.memory or MEMORY}
    amounts |= {"ephemeralStorage": EPHEMERAL_STORAGE}
    amounts |= {"sharedMemory": options.shm} if options.shm else {}
    return {name: amount for name, amount in amounts.items() if (name, amount) != ("gpu", "0")}


def _encode_script(job_spec: JobSpec) -> str:
    # surrogateescape: words of the command line may hold bytes that are not UTF-8, and must arrive as typed.
    text = base64.b64encode(build_node_script(job_spec).encode("utf-8", "surrogateescape")).decode()
    if len(text) > LARGEST_ENTRY_BYTES:
        raise UsageError(
            f"the script with the experiment's files has {len(text)} bytes, the limit is {LARGEST_ENTRY_BYTES}",
            "put large files on a volume of the workspace, and use their paths there",
        )
    return text


def build_node_script(job_spec: JobSpec) -> str:
    """Script of every pod: it unpacks the run folder's files and starts the node; ranks come from PET_*."""
    words = shlex.join((job_spec.inside, job_spec.options.workdir or ".", *job_spec.command))
    return f"""\
#!/bin/sh
set -eu
place=$(mktemp -d)
mkdir "$place/{node_script.FILES}"
base64 -d <<'PRIMUS_END' | tar -xz -C "$place/{node_script.FILES}"
{_encode_archive(job_spec.files)}
PRIMUS_END
cat >"$place/{node_script.SCRIPT}" <<'PRIMUS_END'
{node_script.TEXT}PRIMUS_END
exec sh "$place/{node_script.SCRIPT}" {words}
"""


def _encode_archive(files: Mapping[str, str]) -> str:
    """`files` as a compressed archive in base64 lines, reproducible for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in sorted(files.items()):
            data = text.encode("utf-8", "surrogateescape")
            # TarInfo has time 0 and no owner by default, so equal files give equal requests.
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return base64.encodebytes(gzip.compress(packed.getvalue(), mtime=0)).decode().rstrip("\n")
