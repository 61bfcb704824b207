"""Variables that affect the client of a container engine."""

from __future__ import annotations

CLIENTS = frozenset(
    "PATH HOME USER LOGNAME SHELL TERM TMPDIR PWD OLDPWD IFS ENV BASH_ENV REGISTRY_AUTH_FILE STORAGE_DRIVER "
    "STORAGE_OPTS BUILDAH_ISOLATION PYTHONPATH PYTHONHOME GODEBUG GOGC GOMAXPROCS GOMEMLIMIT GOTRACEBACK "
    "NOTIFY_SOCKET".split()
)
CLIENTS_FAMILIES = tuple("LD_ DOCKER_ CONTAINER _CONTAINER PODMAN_ APPTAINER SINGULARITY XDG_ SSL_CERT_ DBUS_".split())
"""Variables that the engines' clients and their libraries read (documentation of docker, podman, apptainer)."""


def changes_client(name: str) -> bool:
    """Whether the engine's client reads the variable itself."""
    return name in CLIENTS or name.startswith(CLIENTS_FAMILIES)
