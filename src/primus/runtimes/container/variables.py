"""Variables that would change a container engine's own client, or what runs in the container."""

from __future__ import annotations

HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH")
"""Of these an engine that passes on all variables must know nothing."""

CLIENTS = frozenset(
    "PATH HOME USER LOGNAME SHELL TERM TMPDIR PWD OLDPWD IFS ENV BASH_ENV REGISTRY_AUTH_FILE STORAGE_DRIVER "
    "STORAGE_OPTS BUILDAH_ISOLATION PYTHONPATH PYTHONHOME GODEBUG GOGC GOMAXPROCS GOMEMLIMIT GOTRACEBACK "
    "NOTIFY_SOCKET".split()
)
CLIENTS_FAMILIES = tuple("LD_ DOCKER_ CONTAINER _CONTAINER PODMAN_ APPTAINER SINGULARITY XDG_ SSL_CERT_ DBUS_".split())
"""The environment of the engines' clients, and of the libraries they are built with (their manuals)."""


def changes_client(name: str) -> bool:
    """Whether the engine's client reads the variable itself."""
    return name in CLIENTS or name.startswith(CLIENTS_FAMILIES)
