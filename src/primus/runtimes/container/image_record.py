"""Record the image of a run in container.json of its folder, in a thread that does not delay the run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from primus import process
from primus.runs.files import write_json
from primus.runs.store import Run
from primus.runtimes.container.engines import ContainerSpec
from primus.runtimes.container.launched_containers import ENGINE_LIMIT_S

FIRST_WAIT_S = 1.0
"""A local image is known at the first query; only a pull takes longer."""
LONGEST_WAIT_S = 60.0
"""A pull takes minutes, and each query starts a process of the engine."""


class ContainerImage(Struct, frozen=True, kw_only=True):
    """The container of a node."""

    engine: str
    version: str
    image: str
    """Name of the image, as given."""
    id: str = ""
    """The engine's id of the image, a hash of its configuration."""
    digest: str = ""
    """Name and hash in the registry; empty for an image that was built on this host."""
    size_bytes: int | None = None
    """Size of an image file."""
    changed: float | None = None
    """Modification time of an image file."""
    name: str
    """Name of the container."""
    host: str


@contextlib.contextmanager
def record_image(run: Run | None, container: ContainerSpec, environ: Mapping[str, str]) -> Iterator[None]:
    """While open, wait until the engine has the image, and record it in the folder of `run`."""
    if run is None:
        yield
        return
    is_over = threading.Event()
    # A daemon thread: the record is optional, and must not keep the launcher alive.
    writer = threading.Thread(
        target=_write_image_record_when_known, args=(run, container, environ, is_over), daemon=True
    )
    writer.start()
    try:
        yield
    finally:
        # The last query of the thread is limited, too, so that an unresponsive daemon cannot delay the exit.
        is_over.set()
        writer.join(timeout=ENGINE_LIMIT_S)


def _write_image_record_when_known(
    run: Run, container: ContainerSpec, environ: Mapping[str, str], is_over: threading.Event
) -> None:
    """Query the engine with growing pauses: an image may have to be pulled first, which takes minutes."""
    wait_s = FIRST_WAIT_S
    while not _write_image_record(run, container, environ) and not is_over.wait(wait_s):
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    # A last try: a short container may end before the first query after the pull.
    if is_over.is_set():
        _write_image_record(run, container, environ)


def _write_image_record(run: Run, container: ContainerSpec, environ: Mapping[str, str]) -> bool:
    found = _query_daemon_image(container, environ) if container.engine.is_daemon else _read_image_file(container.image)
    if found is None:
        return False
    version = process.run_command([container.engine.program, "--version"], environ, ENGINE_LIMIT_S).text.strip()
    known = ContainerImage(
        engine=container.engine.program,
        version=version,
        image=container.image,
        name=container.name if container.engine.is_daemon else "",
        host=os.uname().nodename,
        **found,
    )
    file = "container.json" if container.rank == 0 else f"container.node_{container.rank}.json"
    with contextlib.suppress(OSError):  # a full disk: other writers report it
        write_json(run.directory / file, known)
    return True


def _query_daemon_image(container: ContainerSpec, environ: Mapping[str, str]) -> dict[str, str] | None:
    form = "{{.Id}}\n{{range .RepoDigests}}{{.}}\n{{end}}"
    words = [container.engine.program, "image", "inspect", "--format", form, container.image]
    answer = process.run_command(words, environ, ENGINE_LIMIT_S)
    lines = answer.text.split()
    if answer.state != "ok" or not lines:
        return None
    return {"id": lines[0], "digest": lines[1] if len(lines) > 1 else ""}


def _read_image_file(image: str) -> dict[str, int | float]:
    try:
        status = Path(image).stat()
    except OSError:
        return {}
    return {"size_bytes": status.st_size, "changed": status.st_mtime}
