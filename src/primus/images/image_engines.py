"""Commands of docker, podman and buildah that build, list, show and remove images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from primus.errors import PrimusError, UnfitError, UsageError, did_you_mean
from primus.images.template import LABEL, ImageRecipe
from primus.process import run_command

EngineKind = Literal["docker", "podman", "buildah"]
KINDS: tuple[EngineKind, ...] = ("docker", "podman", "buildah")
"""In search order."""
LIMIT_S = 60.0
"""Limit of commands that only read or remove."""


class ImageEngine(Struct, frozen=True):
    """A program that builds images."""

    kind: EngineKind
    program: str
    """Name, or the path that was given."""


class FoundImage(Struct, frozen=True, kw_only=True):
    """An image of primus."""

    id: str
    name: str
    size: str
    created: str


class ShownImage(Struct, frozen=True, kw_only=True):
    """An image with its labels."""

    name: str
    platform: str
    labels: dict[str, str]


def choose_image_engine(program: str | None, environ: Mapping[str, str], *, is_needed: bool = True) -> ImageEngine:
    """The engine that was named, that of $PRIMUS_CONTAINER_ENGINE, or the first one on PATH.

    Args:
        program: Value of `--engine`.
        environ: Environment variables.
        is_needed: Whether it must be installed; a dry run shows the commands of docker otherwise.

    Raises:
        UsageError: The name is not that of an engine that builds images.
        UnfitError: No engine is installed.
    """
    asked = [(program, "--engine"), (environ.get("PRIMUS_CONTAINER_ENGINE"), "PRIMUS_CONTAINER_ENGINE")]
    for name, source in asked:
        if not name:
            continue
        kind = next((kind for kind in KINDS if Path(name).name == kind), None)
        if kind is None:
            raise UsageError(f"{source} {name}: cannot build images", did_you_mean(Path(name).name, KINDS))
        if is_needed and _find_program(name, environ) is None:
            raise UnfitError(f"{source} {name}: not found", "install it, or name another engine with --engine")
        return ImageEngine(kind, name)
    found = next((kind for kind in KINDS if _find_program(kind, environ)), None)
    if found is None and is_needed:
        raise UnfitError("no container engine is on PATH", f"install one of {', '.join(KINDS)}")
    return ImageEngine(found or "docker", found or "docker")


def build_image_command(
    engine: ImageEngine, recipe: ImageRecipe, tag: str, context: str, options: Sequence[str] = ()
) -> list[str]:
    """The command that builds the image from the folder `context`; values of secrets are not in it."""
    words = [engine.program, "build", "--file", f"{context}/Containerfile", "--tag", tag]
    words += ["--build-arg", f"BASE={recipe.base}", "--build-arg", f"SOURCE_DATE_EPOCH={recipe.epoch}"]
    if engine.kind != "docker":
        # Files and history of all layers get this time; BuildKit derives that from the build argument.
        words += ["--timestamp", str(recipe.epoch)]
    words += [word for name in recipe.secrets for word in ("--secret", f"id={name},env={name}")]
    return [*words, *options, context]


def list_images(engine: ImageEngine, environ: Mapping[str, str]) -> list[FoundImage]:
    """The images with our label.

    Raises:
        PrimusError: The engine does not answer.
    """
    words = ["images", "--filter", f"label={LABEL}"]
    if engine.kind == "buildah":
        # It aligns the columns of --format with blanks, which its sizes and dates contain.
        found = json.loads(_run_engine(engine, [*words, "--json"], environ))
        return [
            FoundImage(
                id=image["id"],
                name=(image.get("names") or ["<none>:<none>"])[0],
                size=image["size"],
                created=image["createdat"],
            )
            for image in found
        ]
    columns = "\t".join(["{{.ID}}", "{{.Repository}}:{{.Tag}}", "{{.Size}}", "{{.CreatedAt}}"])
    text = _run_engine(engine, [*words, "--format", columns], environ)
    rows = [line.split("\t") for line in text.splitlines() if line.strip()]
    return [FoundImage(id=row[0], name=row[1], size=row[2], created=row[3]) for row in rows]


def show_image(engine: ImageEngine, name: str, environ: Mapping[str, str]) -> ShownImage:
    """An image with its labels.

    Raises:
        UsageError: The image does not exist, or is not one of primus.
    """
    inspect = ["inspect", "--type", "image"] if engine.kind == "buildah" else ["image", "inspect"]
    answer = run_command([engine.program, *inspect, name], environ, limit_s=LIMIT_S)
    if answer.state != "ok":
        raise UsageError(f"image {name} cannot be shown: {answer.problem}", "primus-cli direct -- image list")
    tree = json.loads(answer.text)
    image = tree[0] if isinstance(tree, list) else tree
    # The Config of buildah is text; OCIv1 is the same in JSON.
    config = (image["OCIv1"].get("config") if "OCIv1" in image else image.get("Config")) or {}
    labels: dict[str, str] = config.get("Labels") or {}
    if LABEL not in labels:
        raise UsageError(f"image {name} was not built by primus", "primus-cli direct -- image list")
    return ShownImage(name=name, platform=labels[LABEL], labels=labels)


def remove_image(engine: ImageEngine, image: FoundImage, environ: Mapping[str, str]) -> None:
    """Remove an image.

    Raises:
        PrimusError: A container uses it, or the engine fails.
    """
    _run_engine(engine, ["rmi", image.id], environ)


def _run_engine(engine: ImageEngine, words: Sequence[str], environ: Mapping[str, str]) -> str:
    answer = run_command([engine.program, *words], environ, limit_s=LIMIT_S)
    if answer.state != "ok":
        raise PrimusError(
            f"{engine.program} {words[0]}: {answer.problem}", f"check that `{engine.program} images` works"
        )
    return answer.text


def _find_program(program: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(program, path=environ.get("PATH"))
