"""Let psutil read the host's /proc, where a container mounts it at $HOST_PROC."""

import os
from datetime import date

from primus.patch import Patch

PATCH = Patch(
    target="psutil",
    versions=">=5.9",
    reason="psutil reads /proc of the container",
    link="https://psutil.readthedocs.io/en/latest/#psutil.PROCFS_PATH",
    expires=date(2030, 1, 1),
)


def is_needed() -> bool:
    """Whether $HOST_PROC is set."""
    return "HOST_PROC" in os.environ


def apply() -> None:
    """Set psutil's folder."""
    import psutil

    psutil.PROCFS_PATH = os.environ["HOST_PROC"]
