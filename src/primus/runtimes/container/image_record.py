"""Which image a run had: container.json of its folder, written beside the run without holding it up."""

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
from primus.runtimes.container.launched_containers import ASKING_S

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


class ContainerImage(Struct, frozen=True, kw_only=True):
    """The container of a node."""

    engine: str
    version: str
    image: str
    """As it was named."""
    id: str = ""
    """The engine's own id of the image, a hash of its configuration."""
    digest: str = ""
    """Name and hash under which a registry has it; empty for an image that was made here."""
    size_bytes: int | None = None
    """Of an image that is a file."""
    changed: float | None = None
    """When that file was changed last."""
    name: str
    """Name of the container."""
    host: str


@contextlib.contextmanager
def record_image(run: Run | None, container: ContainerSpec, environ: Mapping[str, str]) -> Iterator[None]:
    """While open, the image is looked up until it is there, and recorded in the folder of `run`."""
    if run is None:
        yield
        return
    is_over = threading.Event()
    writer = threading.Thread(
        target=_write_image_record_when_known, args=(run, container, environ, is_over), daemon=True
    )
    writer.start()
    try:
        yield
    finally:
        is_over.set()
        writer.join(timeout=ASKING_S)


def _write_image_record_when_known(
    run: Run, container: ContainerSpec, environ: Mapping[str, str], is_over: threading.Event
) -> None:
    """An image that must be fetched first is known later."""
    wait_s = FIRST_WAIT_S
    while not _write_image_record(run, container, environ) and not is_over.wait(wait_s):
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    if is_over.is_set():
        _write_image_record(run, container, environ)


def _write_image_record(run: Run, container: ContainerSpec, environ: Mapping[str, str]) -> bool:
    found = _query_daemon_image(container, environ) if container.engine.is_daemon else _read_image_file(container.image)
    if found is None:
        return False
    version = process.run_command([container.engine.program, "--version"], environ, ASKING_S).text.strip()
    known = ContainerImage(
        engine=container.engine.program,
        version=version,
        image=container.image,
        name=container.name if container.engine.is_daemon else "",
        host=os.uname().nodename,
        **found,
    )
    file = "container.json" if container.rank == 0 else f"container.node_{container.rank}.json"
    with contextlib.suppress(OSError):  # a full disk is told of by what writes more
        write_json(run.directory / file, known)
    return True


def _query_daemon_image(container: ContainerSpec, environ: Mapping[str, str]) -> dict[str, str] | None:
    form = "{{.Id}}\n{{range .RepoDigests}}{{.}}\n{{end}}"
    words = [container.engine.program, "image", "inspect", "--format", form, container.image]
    answer = process.run_command(words, environ, ASKING_S)
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
