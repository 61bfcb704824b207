"""List the container images that primus has built on this host."""

from __future__ import annotations

from msgspec import Struct

from primus.images.image_engines import choose_image_engine, list_images
from primus.report.table import format_table
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `image list`."""

    engine: str | None = None
    """docker, podman, buildah, or a path to one (default: $PRIMUS_CONTAINER_ENGINE, else the first of them on PATH)."""


def run(options: Options, context: TaskContext) -> None:
    """Print the images.

    Raises:
        UnfitError: No engine is installed.
        PrimusError: The engine does not answer.
    """
    engine = choose_image_engine(options.engine, context.environ)
    images = list_images(engine, context.environ)
    rows = [[image.name, image.id.removeprefix("sha256:")[:12], image.size, image.created] for image in images]
    table = (
        format_table(["image", "id", "size", "created"], rows) if rows else f"{engine.program} has no image of primus"
    )
    context.result(images, table)
