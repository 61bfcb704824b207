"""Remove the container images that primus has built on this host; lists them unless --yes is given."""

from __future__ import annotations

from msgspec import Struct

from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError
from primus.images.image_engines import FoundImage, choose_image_engine, list_images, remove_image
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `image clean`."""

    yes: bool = False
    """Remove the images."""
    engine: str | None = None
    """docker, podman, buildah, or a path to one (default: $PRIMUS_CONTAINER_ENGINE, else the first of them on PATH)."""


class CleanedImages(Struct, frozen=True, kw_only=True):
    """What `image clean` prints as JSON."""

    images: list[FoundImage]
    removed: list[str]
    problems: list[str]


def run(options: Options, context: TaskContext) -> int:
    """Remove the images with our label, and no other one. Exit code 1 if one could not be removed."""
    engine = choose_image_engine(options.engine, context.environ)
    images = list_images(engine, context.environ)
    removed, problems = [], []
    for image in images if options.yes else ():
        try:
            remove_image(engine, image, context.environ)
            removed.append(image.name)
        except PrimusError as error:
            problems.append(f"{image.name}: {error.problem}")
    lines = [f"{'removed' if image.name in removed else 'image'}: {image.name} ({image.size})" for image in images]
    hint = ["run again with --yes to remove them"] if images and not options.yes else []
    text = "\n".join([*lines, *problems, *hint]) or f"{engine.program} has no image of primus"
    context.result(CleanedImages(images=images, removed=removed, problems=problems), text)
    return EXIT_FAILED if problems else EXIT_OK
