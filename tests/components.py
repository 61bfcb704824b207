"""Real components that tests marked `cluster("name")` need, and how it is known that one is installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

KUBERNETES = Path(os.environ.get("PRIMUS_TEST_KUBERNETES", "/var/cache/primus-test-kubernetes"))
"""Folder of a Kubernetes API server that `tests/cluster/kubernetes.sh install` has built."""

PYXIS = Path(os.environ.get("PRIMUS_TEST_PYXIS", "/opt/primus-test-pyxis"))
"""Folder of pyxis and enroot that `tests/cluster/pyxis.sh install` has compiled."""

PROGRAMS = {
    "slurm": ("slurmctld", "slurmd", "munged", "srun"),
    "docker": ("dockerd", "docker"),
    "podman": ("podman",),
    "apptainer": ("apptainer",),
    "pyxis": (str(PYXIS / "lib/spank_pyxis.so"), str(PYXIS / "bin/enroot"), "mksquashfs"),
    "sshd": ("sshd", "ssh", "ssh-keygen"),
    "prometheus": ("prometheus", "promtool"),
    "kubernetes": ("etcd", str(KUBERNETES / "kube-apiserver")),
}
"""Programs of each component."""

WHERE = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def why_absent(component: str) -> str:
    """Why the tests of `component` cannot run here; empty where they can."""
    missing = [program for program in PROGRAMS[component] if shutil.which(program, path=WHERE) is None]
    if missing:
        return f"{component}: {missing[0]} is not installed (`make test-cluster` installs it)"
    return "" if os.geteuid() == 0 else f"{component}: starting it takes root"
