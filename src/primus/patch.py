"""The contract of patches of upstream packages, and which of them are applied here.

Workers apply the patches whose package is installed in a version of the range, before the task starts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timezone
from typing import Literal, Protocol

from msgspec import Struct

from primus import registry
from primus.contract import PlugInKind, optional
from primus.errors import PrimusError, UnfitError, UsageError, did_you_mean, format_error_place, is_raised_on_import

VARIABLE = "PRIMUS_PATCHES"
"""Variable that selects patches: all (the default), none, or names separated by commas."""

State = Literal["applies", "expired", "not needed", "out of range", "not installed", "other backend"]
REFUSED: tuple[State, ...] = ("out of range", "not installed", "other backend")
"""States that are an error for a patch that the user named."""


class Patch(Struct, frozen=True, kw_only=True):
    """One change of one upstream package."""

    target: str
    """Name of the distribution: ``torch``."""
    versions: str
    """Range of versions that it applies to: ``>=2.6,<2.14``, ``0.8~1.2`` (both included) or ``1.*``."""
    reason: str
    link: str
    """Upstream issue or change."""
    expires: date
    """Day after which the patch is reported: check then whether it is still needed."""
    module: str = ""
    """Import name of a target that a checkout may provide without a distribution: ``megatron.core``."""
    backend: str | tuple[str, ...] | None = None
    """The only framework that needs it, or all of them that do; None for every framework."""
    priority: int = 50
    """Patches with lower numbers are applied first."""


class PatchPlugIn(Protocol):
    """A patch of an upstream package: `patches/NAME.py`.

    It is imported in the launcher, which checks the names in `$PRIMUS_PATCHES`, and in each worker, so imports of the
    package that it changes belong inside the functions.
    """

    @property
    def PATCH(self) -> Patch:
        """The package, the versions that it was made for, the reason, the upstream link and the expiry date."""
        ...

    def apply(self, /) -> None:
        """Change the imported package.

        Called once in each worker before the task starts. Any exception fails the run with a message that names the
        patch.
        """
        ...

    @optional
    def is_needed(self, /) -> bool:
        """Whether this machine needs the patch; must not import the package. Default: True."""
        return True


PATCHES = PlugInKind[PatchPlugIn]("patches", PatchPlugIn)


class PatchChoice(Struct, frozen=True, kw_only=True):
    """A patch, and whether it applies on this machine."""

    name: str
    patch: Patch
    installed: str | None
    """Installed version of its target; None if it is not installed."""
    state: State

    @property
    def applies(self) -> bool:
        return self.state in ("applies", "expired")


def list_chosen_names(environ: Mapping[str, str]) -> tuple[list[str], bool]:
    """Names of the selected patches, and whether the user named them one by one.

    Raises:
        UsageError: The patch does not exist.
    """
    known = registry.list_plug_ins("patches")
    words = [word for word in re.split(r"[\s,]+", environ.get(VARIABLE, "")) if word]
    if words in ([], ["all"]):
        return known, False
    if words == ["none"]:
        return [], False
    for word in words:
        if word.replace("_", "-") not in known:
            raise UsageError(f"${VARIABLE}: no patch '{word}'", did_you_mean(word, [*known, "all", "none"]))
    return list(dict.fromkeys(word.replace("_", "-") for word in words)), True


def choose_patches(
    environ: Mapping[str, str],
    backend: Callable[[], str | None] = lambda: None,
    today: date | None = None,
    folders: Sequence[str] | None = None,
) -> list[PatchChoice]:
    """The selected patches in the order in which they are applied.

    Args:
        environ: Environment with the selection in `PRIMUS_PATCHES`.
        backend: Returns the backend in use, or an empty name if none is; called only for a patch of one backend. None
            selects patches of every framework.
        today: The date that expiry dates are compared with.
        folders: Import path of the interpreter that applies them; None for that of this one.

    Raises:
        UsageError: The patch does not exist, or a patch that the user named does not apply on this machine.
    """
    names, are_named = list_chosen_names(environ)
    found = [_choose_patch(name, backend, today or datetime.now(tz=timezone.utc).date(), folders) for name in names]
    for choice in found:
        if are_named and choice.state in REFUSED:
            raise UsageError(f"${VARIABLE}: patch '{choice.name}' cannot be applied: {_explain_why_not(choice)}")
    return sorted(found, key=lambda choice: (choice.patch.priority, choice.name))


def _choose_patch(
    name: str, backend: Callable[[], str | None], today: date, folders: Sequence[str] | None
) -> PatchChoice:
    plug_in = registry.load_plug_in(PATCHES, name)
    patch = plug_in.PATCH
    installed = _find_installed_version(patch, folders)
    try:
        state = _decide_state(patch, installed, backend, today)
    except PrimusError as error:
        raise PrimusError(f"patch '{name}': {error.problem}", error.hint) from None
    if state not in REFUSED and not _is_needed(name, plug_in):
        state = "not needed"
    return PatchChoice(name=name, patch=patch, installed=installed, state=state)


def _is_needed(name: str, plug_in: PatchPlugIn) -> bool:
    try:
        return plug_in.is_needed()
    except PrimusError:
        raise
    except Exception as error:  # a patch may raise anything
        raise PrimusError(
            f"patch '{name}': is_needed() failed at {format_error_place(error)}: {type(error).__name__}: {error}",
            f"correct it, or start without patches: {VARIABLE}=none",
        ) from error


def _decide_state(patch: Patch, installed: str | None, backend: Callable[[], str | None], today: date) -> State:
    if installed is None:
        return "not installed"
    if not includes_version(patch.versions, installed):
        return "out of range"
    if patch.backend and backend() not in (None, *_list_backends(patch)):
        return "other backend"
    return "expired" if today > patch.expires else "applies"


def _list_backends(patch: Patch) -> tuple[str, ...]:
    return (patch.backend,) if isinstance(patch.backend, str) else patch.backend or ()


def _explain_why_not(choice: PatchChoice) -> str:
    patch = choice.patch
    reasons = {
        "not installed": f"{patch.target} is not installed",
        "out of range": f"it needs {patch.target} {patch.versions}, installed is {choice.installed}",
        "other backend": f"it is for the framework {' or '.join(map(repr, _list_backends(patch)))}",
    }
    return reasons[choice.state]


def _find_installed_version(patch: Patch, folders: Sequence[str] | None) -> str | None:
    from primus.site_folders import find_distribution, find_version

    path = sys.path if folders is None else list(folders)
    # A checkout has no distribution, and is imported before one that is installed.
    return find_version(patch.target, patch.module, path) if patch.module else find_distribution(patch.target, path)


def apply_patch(choice: PatchChoice) -> None:
    """Apply one patch.

    Raises:
        PrimusError: The patch failed; the message names it.
        UnfitError: Its package cannot be imported.
    """
    try:
        registry.load_plug_in(PATCHES, choice.name).apply()
    except Exception as error:  # a patch may raise anything
        if is_raised_on_import(error):
            import traceback

            traceback.print_exc()
            raise UnfitError(
                f"{choice.patch.target} cannot be imported: {type(error).__name__} at {format_error_place(error)}:"
                f" {error}",
                "the traceback is in the log of the rank; install the package again, or use another one",
            ) from error
        raise PrimusError(
            f"patch '{choice.name}' of {choice.patch.target} {choice.installed} failed at {format_error_place(error)}:"
            f" {type(error).__name__}: {error}",
            f"{VARIABLE}=none starts without patches; see {choice.patch.link}",
        ) from error


def includes_version(versions: str, version: str) -> bool:
    """Whether `version` is in the range `versions`.

    Versions compare as in PEP 440: ``2.13.0+cpu`` equals 2.13.0; a pre-release precedes its release but is not ``<``
    it.

    Raises:
        PrimusError: The range or the version is invalid.
    """
    return all(_holds_clause(clause.strip(), _build_version_key(version)) for clause in versions.split(","))


_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)?\s*v?(\d+(?:\.\d+)*(?:(?:a|b|rc|\.dev|\.post)\d+)*)(\.\*)?")
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)[._-]?(?:(a|alpha|b|beta|c|rc)[._-]?(\d*))?(.*)", re.IGNORECASE)
_PHASES = {"a": -3, "alpha": -3, "b": -2, "beta": -2, "c": -1, "rc": -1}

Key = tuple[tuple[int, ...], int, int]


def _build_version_key(version: str) -> Key:
    """A version as a comparable tuple: release, phase (development, alpha, ... final, post), number in the phase."""
    match = _VERSION.match(version.partition("+")[0])
    if match is None:
        raise PrimusError(f"invalid version: {version!r}")
    release = tuple(int(part) for part in match[1].split("."))
    while len(release) > 1 and release[-1] == 0:
        release = release[:-1]
    number = int(match[3] or 0)
    if match[2]:
        return release, _PHASES[match[2].lower()], number
    later = re.match(r"[._-]?(dev|post)(\d*)", match[4])
    return release, {"dev": -4, "post": 1}[later[1]] if later else 0, int(later[2] or 0) if later else 0


def _holds_clause(clause: str, key: Key) -> bool:
    first, tilde, last = clause.partition("~")
    if tilde and not clause.startswith("~"):
        return _holds_clause(f">={first}", key) and _holds_clause(f"<={last}", key)
    match = _CLAUSE.fullmatch(clause)
    if match is None or (match[3] and match[1] not in (None, "==", "!=")):
        raise PrimusError(f"invalid range of versions: {clause!r}", "write one such as >=2.6,<2.14 or 0.8~1.2 or 1.*")
    operator, bound = match[1] or "==", _build_version_key(match[2])
    if match[3]:
        prefix = tuple(int(part) for part in match[2].split("."))
        padded = key[0] + (0,) * len(prefix)
        return (padded[: len(prefix)] == prefix) == (operator == "==")
    is_same_release = key[0] == bound[0]
    return {
        ">=": key >= bound,
        "<=": key <= bound,
        "==": key == bound,
        "!=": key != bound,
        ">": key > bound and not (is_same_release and key[1] > 0 == bound[1]),
        "<": key < bound and not (is_same_release and key[1] < 0 == bound[1]),
    }[operator]
