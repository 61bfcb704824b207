"""Parse hosts: lists, ranges, `user@host:port` and hostfiles."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import UsageError

LIMIT = 16384
"""Maximum hosts in one range; more is a typing error."""


class SshHost(Struct, frozen=True):
    """A host to log in to."""

    name: str
    """Name or address, or an alias of ~/.ssh/config."""
    user: str | None = None
    port: int | None = None

    @property
    def display_name(self) -> str:
        """Name in messages and file names."""
        return self.name if self.port is None else f"{self.name}:{self.port}"

    def format_login(self, options: Sequence[str] = ()) -> str:
        """Arguments that a user types after `ssh` or `ssh-copy-id`: `options` of ssh_config(5), the port, the user."""
        words = [word for option in options for word in ("-o", option)]
        words += [] if self.port is None else ["-p", str(self.port)]
        return shlex.join([*words, f"{self.user}@{self.name}" if self.user else self.name])


def parse_hosts(words: Sequence[str], files: Sequence[str], user: str | None, port: int | None) -> tuple[SshHost, ...]:
    """The hosts in `--hosts`, then those in hostfiles, in order; `user` and `port` are defaults.

    Raises:
        UsageError: A host is invalid or repeated, or there is none.
    """
    written = [(entry, "--hosts") for word in words for entry in _split_outside_brackets(word)]
    written += [entry for file in files for entry in _read_hostfile_lines(file)]
    hosts: list[SshHost] = []
    seen: dict[str, str] = {}
    for entry, where in written:
        for text in _expand_host_range(entry, where):
            host = _parse_host(text, where, user, port)
            if host.display_name in seen:
                raise UsageError(f"{where}: host {host.display_name} is given twice", "each host runs one node")
            seen[host.display_name] = where
            hosts.append(host)
    if not hosts:
        raise UsageError("runtime 'ssh' needs hosts", "--hosts node1,node2 or --hosts 'node[01-16]' or --hostfile FILE")
    return tuple(hosts)


def _split_outside_brackets(text: str) -> list[str]:
    """`text` split at commas outside of brackets."""
    return [entry.strip() for entry in re.findall(r"(?:\[[^\]]*\]|[^,])+", text) if entry.strip()]


def _read_hostfile_lines(file: str) -> list[tuple[str, str]]:
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"--hostfile {file}: {reason}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if len(words) > 1:
            raise UsageError(
                f"{file}:{number}: unexpected '{words[1]}' after a host",
                "write one host per line; -- direct --nproc N sets the number of processes",
            )
        found += [(entry, f"{file}:{number}") for word in words for entry in _split_outside_brackets(word)]
    if not found:
        raise UsageError(f"--hostfile {file} contains no host", "write one host per line")
    return found


_RANGE = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]")


def _expand_host_range(text: str, where: str) -> Iterator[str]:
    """The hosts in `node[01-03,7]`, with leading zeros."""
    match = _RANGE.search(text)
    if not match:
        yield text
        return
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not 0 < len(numbers) <= LIMIT:
            raise UsageError(f"{where}: [{part}] is not a range of hosts", "write node[01-16] or node[1,3]")
        for number in numbers:
            yield from _expand_host_range(f"{text[: match.start()]}{number:0{len(first)}d}{text[match.end() :]}", where)


_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.@+$-]*)@)?"
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*))(?::(?P<port>\d{1,5}))?"
)


def _parse_host(text: str, where: str, user: str | None, port: int | None) -> SshHost:
    match = _HOST.fullmatch(f"[{text}]" if text.count(":") > 1 and "[" not in text else text)
    given = int(match["port"]) if match and match["port"] else port
    if not match or not (given is None or 0 < given < 65536):
        raise UsageError(f"{where}: {text!r} is not a host", "write host, user@host, host:port or [IPv6]:port")
    return SshHost(match["name"] or match["address"], match["user"] or user, given)
