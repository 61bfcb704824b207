"""Explain why Slurm keeps a job in the queue, and what the user can do (squeue(1), JOB REASON CODES)."""

from __future__ import annotations

import re
import time

MEANINGS = {
    "None": "Slurm has not considered it yet",
    "Priority": "jobs with a higher priority are ahead of it: sprio -j {id}",
    "Resources": "it is next, and waits for nodes to become free; fewer nodes or a shorter --time may start earlier",
    "Dependency": "it waits for another job: scontrol show job {id} | grep Dependency",
    "BeginTime": "its begin time has not come; a requeued job waits for about two minutes",
    "Reservation": "it waits for its reservation: scontrol show reservation",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved: sinfo -R, or another --nodelist",
    "Nodes required for job are DOWN": "nodes that it needs are down, drained or reserved: sinfo -R",
    "NodeDown": "a node that it needs is down: sinfo -R",
    "PartitionDown": "its partition is down: choose another one (sinfo -s)",
    "PartitionInactive": "its partition is inactive: choose another one (sinfo -s)",
    "Licenses": "it waits for a license: scontrol show licenses",
    "JobArrayTaskLimit": "its array runs as many tasks at once as --array allows (%N)",
    "Cleaning": "its previous start is being cleaned up",
    "Prolog": "the nodes are being prepared",
    "MaxRequeue": "it was requeued too often: scontrol release {id}",
    "FrontEndDown": "no front end is up: ask an administrator",
}
FAMILIES = {
    r"(MaxMemPerLimit|MaxCpuPerAccount|AccountNotAllowed|QOSNotAllowed)": "its account, quality of service or "
    "partition does not allow it: change --account, --qos or --partition",
    r"QOS(?P<limit>\w+)": "the limit {limit} of its quality of service is reached: it starts when other jobs end; "
    "sacctmgr show qos lists the limits",
    r"Assoc(?P<limit>\w+)": "the limit {limit} of its account is reached: it starts when jobs of the account end; "
    "another one: --account",
}
"""Reasons of the limits of accounting, which have names such as QOSMaxGRESPerUser and AssocGrpNodeLimit."""


def explain_reason(number: str, reason: str) -> str:
    """Meaning of the `reason` for which job `number` is queued, with the next step; empty for an unknown one."""
    name = re.split(r"[,:(]", reason.strip("()"), maxsplit=1)[0].strip()
    for pattern, text in FAMILIES.items():
        match = re.fullmatch(pattern, name)
        if match:
            return text.format(limit=match.groupdict().get("limit", ""))
    return MEANINGS.get(name, "").format(id=number)


def parse_time(text: str) -> float | None:
    """Seconds since the epoch of a time as squeue prints it, in this machine's time zone; None for N/A."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def count_gpus_per_node(text: str) -> int | None:
    """GPUs in the requested resources of a node: ``gres:gpu:mi300x:8,gres:nvme:1``; None without GPUs."""
    counts = []
    for part in text.split(","):
        words = re.sub(r"^gres[:/]|\(.*", "", part.strip()).split(":")
        if words[0] == "gpu":
            counts.append(int(words[-1]) if words[-1].isdecimal() else 1)
    return sum(counts) if counts else None
