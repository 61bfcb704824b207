"""Files of the Hugging Face Hub, with hints for what it refuses; ``HF_ENDPOINT`` names a mirror.

The package huggingface_hub sends the requests: it resumes a download in the cache, and reads proxies, HF_TOKEN, HF_HOME
and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from socket import gaierror
from typing import Any, Literal

from primus.errors import PrimusError, UsageError, describe_owner
from primus.web.retries import is_client_error, read_retry_after, repeat_download

RepositoryKind = Literal["dataset", "model"]

MISSING: dict[RepositoryKind, tuple[str, str]] = {
    "dataset": ("no such dataset on {hub}", "check OWNER/NAME; a private one needs HF_TOKEN; see data fetch --list"),
    "model": (
        "neither a local path, nor a model on {hub} that you may see",
        "check the name; a private model needs HF_TOKEN",
    ),
}
"""Problem and hint for a name that is not there."""
OFFLINE: dict[RepositoryKind, str] = {
    "dataset": "fetch the data where there is a network",
    "model": "give a local path, or download it where there is a network (`hf download`) and set HF_HOME to that cache",
}
"""What to do without the hub."""

CACHED_MODEL = "models--"
"""Begins the name of a model's folder in the hub's cache (huggingface_hub, guides/manage-cache)."""


def read_hub_endpoint() -> str:
    """Address of the hub: ``$HF_ENDPOINT``, or the public one."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def import_hub_library(name: str, otherwise: str = "") -> Any:
    """Import the package huggingface_hub.

    Args:
        name: What needs it.
        otherwise: Added to the hint.

    Raises:
        UsageError: The package is not installed.
    """
    try:
        import huggingface_hub
    except ImportError:
        problem, hint = f"{name}: the hub needs the package huggingface_hub", "pip install huggingface_hub"
        raise UsageError(problem, f"{hint}{otherwise}") from None
    return huggingface_hub


def download_file(
    repo: str,
    file: str,
    kind: RepositoryKind,
    *,
    revision: str | None = None,
    folder: Path | None = None,
    count: Callable[[int], None] | None = None,
) -> Path:
    """Download a file into the hub's cache, or to its path below `folder`.

    Args:
        repo: OWNER/NAME.
        file: Path in the repository.
        kind: Kind of the repository.
        revision: Commit, branch or tag; by default the newest commit.
        folder: Folder for the file instead of the cache.
        count: Receives numbers of downloaded bytes.

    Raises:
        UsageError: The repository or the file does not exist.
        PrimusError: The hub does not respond, or refuses the file.
    """
    library = import_hub_library(repo)
    options: dict[str, Any] = {"tqdm_class": _make_progress_bar(count)} if count else {}
    if folder is not None:
        options["local_dir"] = str(folder)

    def download() -> str:
        endpoint = read_hub_endpoint()
        path: str = library.hf_hub_download(repo, file, repo_type=kind, revision=revision, endpoint=endpoint, **options)
        return path

    with explain_hub_errors(repo, kind, file):
        return Path(repeat_download(read_hub_endpoint(), download))


def read_optional_file(model: str, file: str, ask_hub: bool) -> bytes | None:
    """Read an optional small file of a model; None if it does not exist or cannot be downloaded.

    Args:
        model: OWNER/NAME.
        file: Path in the repository.
        ask_hub: Whether to download the file if it is not in the local cache.
    """
    try:
        if ask_hub:
            return download_file(model, file, "model").read_bytes()
        found = import_hub_library(model).try_to_load_from_cache(model, file)
        return Path(found).read_bytes() if isinstance(found, str) else None
    except (PrimusError, OSError):
        return None


def find_model_folder(name: str) -> Path:
    """The folder of a model: a path, or a name in the cache of the hub, downloaded if it is not there.

    Args:
        name: The path, or ``ORGANIZATION/NAME`` with or without ``@REVISION``.

    Raises:
        PrimusError: It cannot be downloaded.
    """
    path = Path(os.path.expanduser(name))
    found = path if path.exists() else find_cached_model(name)
    if found is not None:
        return found
    library = import_hub_library(f"hf:{name}, which is not in the cache", ", or give a folder")
    model, revision = split_revision(name)
    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    with explain_hub_errors(f"hf:{name}", "model"):
        return Path(
            library.snapshot_download(
                model, revision=revision or None, allow_patterns=patterns, endpoint=read_hub_endpoint()
            )
        )


def find_cached_model(name: str) -> Path | None:
    """The snapshot of a model in the cache, by default the newest one; None if it is not there, or incomplete."""
    model, revision = split_revision(name)
    repository = _find_cache_folder() / f"{CACHED_MODEL}{model.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")  # of a branch or tag: a file with the commit
    with explain_hub_errors(f"hf:{name}", "model"):
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    if not commit:
        return None
    snapshot = repository / "snapshots" / commit
    # An interrupted download may lack weights.
    has_weights = any(snapshot.glob("*.safetensors"))
    return snapshot if has_weights and (snapshot / "config.json").is_file() else None


def _find_cache_folder() -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


def split_revision(name: str) -> tuple[str, str]:
    """Model and revision of ``NAME@REVISION``: a branch, a tag or a commit; empty for the default branch."""
    model, _, revision = name.partition("@")
    return model, revision


def name_cached_model(folder: Path) -> tuple[str, str] | None:
    """Model and commit of a snapshot in the hub's cache; None for another folder."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith(CACHED_MODEL):
        return None
    return repository.removeprefix(CACHED_MODEL).replace("--", "/"), folder.name


@contextmanager
def explain_hub_errors(repo: str, kind: RepositoryKind, file: str = "") -> Iterator[None]:
    """Convert errors of the hub's library, for a repository as the user names it or a file in it, into errors with a
    hint.
    """
    try:
        yield
    except Exception as error:
        explained = _explain_error(error, repo, kind, file)
        if explained is None:
            raise
        raise explained from None


def _explain_error(error: BaseException, repo: str, kind: RepositoryKind, file: str) -> PrimusError | None:
    """The error with a hint; None if it is not one of the hub, its cache or the network."""
    if isinstance(error, PermissionError):
        return _build_cache_error(error, repo)
    from huggingface_hub import errors

    hub = read_hub_endpoint()
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        # The library reports an unreachable hub as a missing cache entry; the cause has the network error.
        return _explain_error(error.__cause__, repo, kind, file) or _build_unreachable_error(error, repo, kind)
    if isinstance(error, errors.GatedRepoError):
        page = f"{hub}/{'datasets/' * (kind == 'dataset')}{split_revision(repo.removeprefix('hf:'))[0]}"
        problem = f"{repo}: this {kind} is available only after accepting its terms"
        return PrimusError(problem, f"accept them at {page} and set HF_TOKEN")
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        problem, hint = MISSING[kind]
        return UsageError(f"{repo}: {problem.format(hub=hub)}", hint)
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"{repo}: no such revision", "it may have been deleted: name another, or use a new folder")
    if isinstance(error, errors.OfflineModeIsEnabled):
        problem = f"{repo}: the hub is not accessed because HF_HUB_OFFLINE is set"
        return PrimusError(problem, f"unset HF_HUB_OFFLINE, or {OFFLINE[kind]}")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return UsageError(f"{repo}: this {kind} has no file {file}", f"see its files at {hub}")
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        return PrimusError(f"{repo}: {hub} responded with {status}", _choose_hint(status, error))
    # Not any OSError: a full disk is one.
    network = (ConnectionError, TimeoutError, gaierror, errors.LocalEntryNotFoundError, errors.HfHubHTTPError)
    if isinstance(error, network) or is_client_error(error):
        return _build_unreachable_error(error, repo, kind)
    return None


def _build_cache_error(error: PermissionError, repo: str) -> PrimusError | None:
    """The cache is another user's; None if the error is of another folder, such as an output."""
    path, cache = Path(str(error.filename)), _find_cache_folder()
    if not path.is_relative_to(cache):
        return None
    return PrimusError(
        f"{repo}: the cache of the hub cannot be used: {path}: {error.strerror}",
        f"{describe_owner(path)}, who can share it (chmod -R g+rwX {cache}, and umask 002), or give HF_HUB_CACHE a"
        " folder of your own; HF_HUB_OFFLINE=1 takes what is cached without looking for newer files",
    )


def _build_unreachable_error(error: BaseException, repo: str, kind: RepositoryKind) -> PrimusError:
    reason = (str(error) or type(error).__name__).splitlines()[0][:200]
    hint = f"check the network, HF_ENDPOINT and the proxy variables; or {OFFLINE[kind]}"
    return PrimusError(f"{repo}: {read_hub_endpoint()} cannot be reached: {reason}", hint)


def _choose_hint(status: int, error: BaseException) -> str:
    if wait := read_retry_after(error):
        return f"it asks to wait {math.ceil(wait):,} s; then run the same command again"
    hints = {401: "set HF_TOKEN to a valid token", 403: "this token may not read it", 429: "wait a few minutes"}
    return hints.get(status, "try again later")


def _make_progress_bar(count: Callable[[int], None]) -> Any:
    """A progress bar for the hub's library that draws nothing and counts bytes."""
    utils: Any = import_module("huggingface_hub.utils")  # an attribute of the package only after an import of it

    class Bar(utils.tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

    return Bar
