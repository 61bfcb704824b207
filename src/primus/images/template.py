"""The Containerfile of an image, from the template of its platform."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec
import yaml
from msgspec import Struct

from primus import registry
from primus.errors import PrimusError, UsageError

ROOT = "/opt/primus"
"""Where the checkout is in the image."""
LABEL = "primus.image"
"""Label with the platform; marks the images that `image clean` may remove."""


class ImageTemplate(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of presets/images."""

    base: str
    """Image to build on."""
    variables: dict[str, str] = {}
    """Variables of the installation."""


class ImageRecipe(Struct, frozen=True, kw_only=True):
    """What an image is built from."""

    platform: str
    base: str
    variables: Mapping[str, str] = {}
    engines: Sequence[str] = ()
    """Training engines to install: `torchtitan`."""
    secrets: Sequence[str] = ()
    """Names of variables of the installation that are build secrets."""
    is_prepared: bool = False
    """Whether the base has all packages, so that nothing is installed."""
    version: str
    revision: str
    """Commit of the checkout."""
    epoch: int
    """Time of the commit, in seconds since the epoch; the time of all files."""

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the image; `org.opencontainers.image` is the OCI's annotation specification."""
        return {
            LABEL: self.platform,
            "primus.engines": ",".join(self.engines),
            "org.opencontainers.image.title": f"primus for {self.platform}",
            "org.opencontainers.image.version": self.version,
            "org.opencontainers.image.revision": self.revision,
            "org.opencontainers.image.base.name": self.base,
        }


def read_template(platform: str) -> ImageTemplate:
    """The template of a platform.

    Raises:
        UsageError: There is none; the message names the nearest.
        PrimusError: Its file is damaged.
    """
    file = registry.find_plug_in_file("images", platform)
    if file is None:
        raise UsageError(f"no image '{platform}'", "templates are YAML files in a folder images of $PRIMUS_PLUGINS")
    try:
        return msgspec.convert(yaml.safe_load(file.read_text(encoding="utf-8")), ImageTemplate)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise PrimusError(f"{file}: {error}", "a template has the keys base and variables") from None


def format_containerfile(recipe: ImageRecipe) -> str:
    """The Containerfile. It holds no value that a secret has, and nothing that differs between two builds."""
    labels = [f"    {name}={_quote_value(value)}" for name, value in sorted(recipe.labels.items())]
    return "\n".join(
        [
            f"# primus for {recipe.platform}, written by `primus-cli image build`.",
            f"ARG BASE={recipe.base}",
            "FROM ${BASE}",
            "ARG SOURCE_DATE_EPOCH",
            f"COPY . {ROOT}",
            *(_list_prepared_steps() if recipe.is_prepared else _list_setup_steps(recipe)),
            "LABEL \\",
            " \\\n".join(labels),
            "WORKDIR /workspace",
            'CMD ["primus-cli", "--help"]',
            "",
        ]
    )


def _list_setup_steps(recipe: ImageRecipe) -> list[str]:
    """Install primus, its packages and the engines into an environment of the image."""
    words = [f"{ROOT}/primus-cli", "setup"] + [word for name in recipe.engines for word in ("--engine", name)]
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(recipe.variables.items())]
    # Compiled files hold the times of their sources.
    setup = " ".join(["PYTHONDONTWRITEBYTECODE=1", "PIP_NO_CACHE_DIR=1", *variables, *map(shlex.quote, words)])
    mounts = "".join(f"--mount=type=secret,id={name} " for name in recipe.secrets)
    reads = "".join(f'export {name}="$(cat /run/secrets/{name})" && ' for name in recipe.secrets)
    comment = ["# Secrets are files of this step only: they are in no layer."] if recipe.secrets else []
    return [*comment, f"RUN {mounts}{reads}{setup}", f"ENV PATH={ROOT}/.venv/bin:$PATH"]


def _list_prepared_steps() -> list[str]:
    """Use the packages of the base; the step fails if one is missing."""
    return [
        f"ENV PATH={ROOT}:$PATH PYTHONPATH={ROOT}/src",
        "RUN PYTHONDONTWRITEBYTECODE=1 primus-cli --version",
    ]


def check_secret_name(name: str) -> str:
    """The name of a variable.

    Raises:
        UsageError: It is something else, such as a value.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        # The text is not repeated: it may be the secret itself.
        raise UsageError("--secret takes the name of a variable", "export the variable, and give its name")
    return name


def _quote_value(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'
