"""Build a container image of primus for AMD GPUs, NVIDIA GPUs or CPUs."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from primus import __version__
from primus.errors import PrimusError, UsageError
from primus.images.build_context import read_checkout, write_context
from primus.images.image_engines import ImageEngine, build_image_command, choose_image_engine, show_image
from primus.images.template import ImageRecipe, check_secret_name, format_containerfile, read_template
from primus.process import end_program
from primus.redaction import redact_args
from primus.task import TaskContext

AUTO = "auto"
CONTEXT = "CONTEXT"
"""Stands for the temporary folder in a dry run."""
LAST_LINES = 5
PATIENCE_S = 10.0


class Options(Struct, frozen=True, kw_only=True):
    """Options of `image build`."""

    platform: str = AUTO
    """amd, nvidia, cpu, or a template of your own; auto takes that of this machine's GPUs."""
    engine: str | None = None
    """docker, podman, buildah, or a path to one (default: $PRIMUS_CONTAINER_ENGINE, else the first of them on PATH)."""
    base: str | None = None
    """Image to build on, instead of that of the template; with a digest (NAME@sha256:...) the build is pinned."""
    tag: str | None = None
    """Name of the image (default: localhost/primus:PLATFORM)."""
    framework: tuple[str, ...] = ()
    """Training engine to install, such as torchtitan or megatron; may be repeated."""
    prepared: bool = False
    """The base has all packages that primus needs: install nothing."""
    secret: tuple[str, ...] = ()
    """Variable that the installation needs, such as PIP_INDEX_URL, as a build secret; may be repeated."""
    build_option: tuple[str, ...] = ()
    """Further option of the engine: --build-option=--network=host; may be repeated."""


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """The Containerfile and the command that builds it."""
    recipe = choose_recipe(options, context)
    engine = choose_image_engine(options.engine, context.environ, is_needed=False)
    # The command names secrets, and has no value but those of the user's options.
    passed = redact_args(options.build_option)
    command = build_image_command(engine, recipe, choose_tag(options, recipe), CONTEXT, passed)
    return [
        f"Containerfile:\n{format_containerfile(recipe)}",
        f"{CONTEXT}: the tracked files of {read_checkout(context.environ).root}",
        f"build: {shlex.join(command)}",
    ]


def run(options: Options, context: TaskContext) -> None:
    """Build the image.

    Raises:
        UsageError: The platform, the engine or a secret does not exist.
        UnfitError: No engine is installed.
        PrimusError: The build failed.
    """
    recipe = choose_recipe(options, context)
    missing = [name for name in recipe.secrets if name not in context.environ]
    if missing:
        # Messages hide the words of --secret, so that a value by mistake is not shown: the place names the variable.
        place = recipe.secrets.index(missing[0]) + 1
        raise UsageError(
            f"--secret: variable {place} of {len(recipe.secrets)} is not set", "export it before the command"
        )
    engine = choose_image_engine(options.engine, context.environ)
    tag = choose_tag(options, recipe)
    with tempfile.TemporaryDirectory(prefix="primus-image-") as folder:
        write_context(Path(folder), read_checkout(context.environ), format_containerfile(recipe))
        command = build_image_command(engine, recipe, tag, folder, options.build_option)
        context.say(f"{engine.program} builds {tag} on {recipe.base}")
        environ = {**context.environ, "SOURCE_DATE_EPOCH": str(recipe.epoch)}
        # Of docker, only BuildKit has secrets; it is a component that may be missing.
        _build(engine, command, environ | ({"DOCKER_BUILDKIT": "1"} if recipe.secrets else {}))
    built = show_image(engine, tag, context.environ)
    context.result(built, f"built {tag}\n  primus-cli container --image {tag} -- TASK")


def choose_recipe(options: Options, context: TaskContext) -> ImageRecipe:
    """What the image is built from."""
    platform = options.platform
    if platform == AUTO:
        vendors = sorted({device.vendor for device in context.facts().devices})
        if len(vendors) > 1:
            raise UsageError(f"this machine has GPUs of {' and '.join(vendors)}", "name one: --platform amd")
        platform = vendors[0] if vendors else "cpu"
    template, checkout = read_template(platform), read_checkout(context.environ)
    return ImageRecipe(
        platform=platform,
        base=options.base or template.base,
        variables=template.variables,
        engines=options.framework,
        is_prepared=options.prepared,
        secrets=tuple(check_secret_name(name) for name in options.secret),
        version=__version__,
        revision=checkout.revision,
        epoch=checkout.epoch,
    )


def choose_tag(options: Options, recipe: ImageRecipe) -> str:
    """The name of the image; docker and podman agree on names below localhost."""
    return options.tag or f"localhost/primus:{recipe.platform}"


def _build(engine: ImageEngine, command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run the engine with its output on standard error; it ends with this process."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    child = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        assert child.stdout is not None, "it is a pipe"
        for line in child.stdout:
            sys.stderr.write(line)
            if line.strip():
                last.append(line.strip())
        code = child.wait()
    finally:
        end_program(child, PATIENCE_S)
        if child.stdout is not None:
            child.stdout.close()
    if code:
        text = "\n  ".join(last)
        hint = (
            "free space, or remove images: primus-cli direct -- image clean --yes" if "no space left" in text else text
        )
        raise PrimusError(f"{engine.program} could not build the image (exit code {code})", hint)
