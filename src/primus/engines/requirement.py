"""What a framework requires of an engine, such as TorchTitan: the data of `frameworks/NAME/packages.yaml`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from primus import registry
from primus.config.data_file import convert_data, read_data_file
from primus.errors import PrimusError
from primus.patch import includes_version

PYTHON_VERSIONS = ("3.10", "3.11", "3.12", "3.13")
"""As in `primus-cli`."""


class EnginePackages(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The packages of an engine's environment on some versions of Python."""

    packages: tuple[str, ...]
    """Pinned requirements: ``torchtitan==0.3.0``."""
    with_requirements: bool = True
    """Whether what `packages` require is installed too. False: `packages` names all that the engine needs, because its
    own requirements cannot be met, or name far more (``pip install --no-deps``)."""
    if_missing: dict[str, str] = {}
    """Pinned requirement by the module that it provides; installed unless the shared packages provide the module."""
    pins: tuple[str, ...] = ()
    """Versions of the packages that these require and that the shared packages do not provide."""
    download_mb: int = 0
    """Approximate size of the download in MB."""

    def describe(self, requirements: Sequence[str]) -> str:
        """`torchtitan==0.3.0 and what they require`; of a complete list the first, which is the engine itself."""
        if self.with_requirements:
            return f"{', '.join(requirements)} and what they require"
        return f"{requirements[0]} and {len(requirements) - 1} other packages"


class EngineRequirement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine: `frameworks/NAME/packages.yaml`, named in the `ENGINES` of the framework that drives it.

    The first comment of the file is its summary.
    """

    title: str
    """Name in messages: ``TorchTitan``."""
    module: str
    """Import name: ``megatron.core``."""
    package: str
    """Name of the distribution: ``megatron-core``."""
    versions: str
    """Range of versions that the framework is written for: ``>=0.16,<0.20``."""
    python: dict[str, EnginePackages] = {}
    """Packages of the environment that `setup --engine NAME` makes, by range of Python versions (``>=3.11,<3.12``); the
    first range that includes the version counts. If none includes the version of primus, setup uses another
    interpreter. Empty: the engine comes from an image, or from an environment that the user makes."""
    imports: tuple[str, ...] = ()
    """Modules whose import shows that a new environment works; `module` if empty."""
    import_variables: dict[str, str] = {}
    """Variables of the process that imports them."""
    needs: tuple[str, ...] = ("torch",)
    """Modules that the main environment must provide, because they fit its devices."""
    checkout_variables: tuple[str, ...] = ()
    """Variables that name a checkout of the engine, which takes precedence over an installed package."""
    checkout_paths: tuple[str, ...] = (".",)
    """Where the package is in such a checkout; a checkout of AMD-AGI/Primus has engines below `third_party`."""
    remedy: str = ""
    """What to do where no environment can be made."""

    def find_packages(self, python_version: str) -> EnginePackages | None:
        """The packages of an environment on a version of Python; None if the engine is not available for it."""
        return next(
            (each for versions, each in self.python.items() if includes_version(versions, python_version)), None
        )

    def list_python_versions(self) -> list[str]:
        """The versions of Python that the engine is available for, of those that primus supports: ``3.12``."""
        return [version for version in PYTHON_VERSIONS if self.find_packages(version)]


def read_engine(name: str) -> EngineRequirement:
    """The requirement of the engine `name`.

    Raises:
        UsageError: The engine does not exist, or its file is invalid.
    """
    path = registry.find_plug_in_file("engines", name)
    if path is None:
        raise PrimusError(f"engine '{name}': an entry point cannot provide an engine", "put a YAML file in engines/")
    file = read_data_file(path)
    return convert_data(file.values, EngineRequirement, [file])


def list_engines() -> dict[str, EngineRequirement]:
    """All known engines by name."""
    return {name: read_engine(name) for name in registry.list_plug_ins("engines")}
