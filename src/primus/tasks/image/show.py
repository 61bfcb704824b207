"""Show what a container image of primus was built from."""

from __future__ import annotations

from msgspec import Struct

from primus.config.flags import Positional
from primus.images.image_engines import choose_image_engine, show_image
from primus.report.table import format_table
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `image show`."""

    image: Positional
    """Name or id of the image."""
    engine: str | None = None
    """docker, podman, buildah, or a path to one (default: $PRIMUS_CONTAINER_ENGINE, else the first of them on PATH)."""


def run(options: Options, context: TaskContext) -> None:
    """Print the labels.

    Raises:
        UsageError: The image does not exist, or is not one of primus.
        UnfitError: No engine is installed.
    """
    shown = show_image(choose_image_engine(options.engine, context.environ), options.image, context.environ)
    context.result(shown, format_table(["label", "value"], [list(item) for item in sorted(shown.labels.items())]))
