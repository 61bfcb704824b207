"""Find and read files at URLs with fsspec, with time limits and retries.

Two kinds of failures are retried: a failure of the network (`TRIES` attempts, within `ABORT_AFTER_S`), and a transient
response of the server, which has the longer limits of `primus.web.retries`. Other failures are final.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from functools import lru_cache
from shlex import quote
from typing import Any, BinaryIO, NamedTuple, TypeVar

from primus.data.readers.kinds import KNOWN, detect_kind, is_kept_in_trees
from primus.errors import PrimusError, UsageError
from primus.web import retries
from primus.web.hub import read_hub_endpoint

TRIES = 3
FIRST_PAUSE_S = 0.5
"""Pause before the second attempt; doubled before each further one."""
CONNECT_TIMEOUT_S = 4.0
"""Time limit of a connection: allows two retransmissions of a lost packet, after 1 s and 3 s (RFC 6298)."""
READ_TIMEOUT_S = 15.0
"""Longest wait for the next bytes of a web server."""
ABORT_AFTER_S = 25.0
"""Time after which a failure is final, so that an unreachable host is reported within half a minute."""
BLOCK = 4 << 20
"""Bytes of one range request."""

WEB = ("http://", "https://")
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "http": "fsspec[http]",
    "https": "fsspec[http]",
}
"""Package that a protocol needs in addition to fsspec."""

FINAL_STATUSES = frozenset({400, 401, 403, 404, 410})
"""Status codes that a retry does not change."""

Result = TypeVar("Result")


class RemoteFacts(NamedTuple):
    """Metadata of a remote file."""

    size: int
    """Size in bytes; 0 if the server does not report it."""
    version: str
    """ETag, checksum or modification time; empty if the server does not report any."""


def find_remote_files(url: str) -> list[str]:
    """Find the files of a URL, sorted: the file itself, the matches of a pattern, or the known files of a folder.

    Raises:
        UsageError: The URL does not exist, or the package for its protocol is not installed.
        PrimusError: The host does not respond.
    """
    system, path = find_file_system(url)
    if set("*?[") & set(path) and not url.startswith(WEB):
        found = _retry_request(url, lambda: system.glob(path))
        return sorted(system.unstrip_protocol(file) for file in found if detect_kind(file))
    if url.startswith(WEB) or detect_kind(url):
        if not detect_kind(url):
            raise UsageError(f"{url}: unsupported kind of text file", KNOWN)
        read_remote_facts(url)
        return [url]
    below = _retry_request(url, lambda: system.find(path))
    return sorted(system.unstrip_protocol(file) for file in below if is_kept_in_trees(file))


def read_remote_facts(url: str) -> RemoteFacts:
    """Read the size and version of the file at a URL.

    Raises:
        UsageError: The file does not exist.
        PrimusError: The host does not respond.
    """
    system, path = find_file_system(url)
    info = _retry_request(url, lambda: system.info(path))
    keys = ("ETag", "etag", "blob_id", "md5Hash", "checksum", "LastModified", "mtime", "created")
    return RemoteFacts(int(info.get("size") or 0), next((str(info[key]) for key in keys if info.get(key)), ""))


def open_url(url: str) -> BinaryIO:
    """Open the file at a URL; reading resumes at the same byte after a broken connection.

    Raises:
        UsageError: The file does not exist.
        PrimusError: The host does not respond.
    """
    return io.BufferedReader(_RemoteFile(url), BLOCK)


class _RemoteFile(io.RawIOBase):
    """A remote file that is reopened at the same byte when the connection breaks.

    State: `_position` counts the bytes that the caller has received; `_file` is the open connection, or None after a
    failure until the next attempt reopens it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._system, self._path = find_file_system(url)
        self._position = 0
        self._file: Any = None
        _retry_request(url, self._open_file)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return _has_ranges(self._file)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = int(self._file.seek(offset, whence))
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        content: bytes = _retry_request(self._url, lambda: self._read(len(buffer)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()

    def _read(self, size: int) -> bytes:
        if self._file is None:
            self._open_file()
        try:
            return bytes(self._file.read(size))
        except BaseException:
            # The file object may have lost its position or part of its buffer: the next attempt opens a new one.
            self._file, broken = None, self._file
            broken.close()
            raise

    def _open_file(self) -> None:
        options = {} if self._url.startswith("hf://") else {"block_size": BLOCK, "cache_type": "readahead"}
        file = self._system.open(self._path, "rb", **options)
        try:
            _seek_file(file, self._position)
        except BaseException:
            file.close()
            raise
        self._file = file


def _seek_file(file: Any, position: int) -> None:
    """Seek in a file that has just been opened; without range requests, read the bytes before the position again."""
    if _has_ranges(file):
        file.seek(position)
        return
    while position:
        chunk = file.read(min(BLOCK, position))
        if not chunk:
            raise EOFError("it was truncated while it was read")
        position -= len(chunk)


def _has_ranges(file: Any) -> bool:
    """Whether a file supports random access; fsspec's web stream claims so too, but has no size."""
    return getattr(file, "size", 0) is not None


def _retry_request(url: str, act: Callable[[], Result]) -> Result:
    """Return the result of `act`; retry it after failures of the network and transient responses."""
    start = time.monotonic()
    try:
        return retries.repeat_request(act, lambda error, attempt: _choose_pause(url, error, attempt, start))
    except FileNotFoundError:
        raise UsageError(f"{url}: no such file", "check the spelling and your access rights") from None
    except PermissionError as error:
        raise PrimusError(f"{url}: access denied: {error}", "log in to its store, or ask its owner") from None


def _choose_pause(url: str, error: Exception, attempt: int, start: float) -> float | None:
    """Pause after attempt number `attempt` (from 1); None if the error is final. A responding server gets more time.

    Raises:
        PrimusError: It was the last attempt.
    """
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec may raise this error for any failed request; the cause tells the reason
    if isinstance(error, (FileNotFoundError, PermissionError)) or not _is_network_error(error):
        return None
    waited, asked = time.monotonic() - start, retries.compute_pause(error, attempt)
    if asked is None:
        pause, is_over = FIRST_PAUSE_S * 2 ** (attempt - 1), attempt == TRIES or waited > ABORT_AFTER_S
    else:
        pause, is_over = asked, attempt == retries.TRIES or waited + asked > retries.LONGEST_WAIT_S
    if is_over:
        reason = str(error) or type(error).__name__
        problem = f"{url}: cannot be reached, {reason} (tries: {attempt})"
        wait = retries.read_retry_after(error)
        hint = f"it asks to wait {wait:,.0f} s; then run the same command again" if wait else ""
        raise PrimusError(problem, hint or "check the address and the network") from None
    if asked is not None:
        retries.print_stderr(f"{url}: its server asks to wait, trying again in {pause:.0f} s")
    return pause


def _is_network_error(error: Exception) -> bool:
    """Whether a retry may succeed; the client libraries have separate exception types."""
    if getattr(error, "status", None) in FINAL_STATUSES:
        return False
    import asyncio  # slow, and no OSError raises its TimeoutError before Python 3.11

    return isinstance(error, (OSError, asyncio.TimeoutError)) or retries.is_client_error(error)


def find_file_system(url: str) -> tuple[Any, str]:
    """Find the fsspec file system of a URL, and the path in it.

    Raises:
        UsageError: The protocol is unknown, or its package is not installed.
    """
    protocol = re.split(r"::|://", url)[0]
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(f"{url}: reading URLs needs the package fsspec", "pip install fsspec") from None
    try:
        system = _connect_file_system(protocol) if protocol in SETTINGS else fsspec.core.url_to_fs(url)[0]
    except ImportError:
        package = PACKAGES.get(protocol, f"for {protocol} that fsspec names")
        raise UsageError(f"{url}: this needs the package {package}", f"pip install {quote(package)}") from None
    except ValueError as error:
        raise UsageError(f"{url}: {error}", "known: https:// s3:// gs:// hf:// and what fsspec knows") from None
    return system, str(system._strip_protocol(url))


def _connect_file_system(protocol: str) -> Any:
    """Create the file system of a protocol that needs the settings in `SETTINGS`."""
    import fsspec

    return fsspec.filesystem(protocol, **SETTINGS[protocol]())


@lru_cache(maxsize=1)
def _build_web_settings() -> dict[str, object]:
    """Settings of the HTTP file system: time limits, and the proxy of the environment."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}


SETTINGS: dict[str, Callable[[], dict[str, object]]] = {
    "http": _build_web_settings,
    "https": _build_web_settings,
    "hf": lambda: {"endpoint": read_hub_endpoint()},
}
