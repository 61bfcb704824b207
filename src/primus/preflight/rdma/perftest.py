"""Run `ib_write_bw` of perftest as a server or a client on one RDMA port, and parse its table."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

from msgspec import Struct

from primus import process

PROGRAM = "ib_write_bw"
MESSAGE_BYTES = 8 << 20
"""Message size of the floors in ROCm/cvs for 400 Gb/s."""
LISTEN_LIMIT_S = 10.0
POLL_S = 0.02
UNITS = {"Gb/sec": 1.0, "MB/sec": 8 * 2**20 / 1e9, "MiB/sec": 8 * 2**20 / 1e9}
"""Gb/s of each unit of perftest's header; its MB is 2^20 bytes (linux-rdma/perftest, perftest_resources)."""


class Rail(Struct, frozen=True, kw_only=True):
    """An RDMA port; ports with the same index on all nodes form a rail."""

    index: int
    hca: str
    port: int
    rate_gbps: float | None = None
    gid_index: int | None = None
    """Required for RoCE, not for InfiniBand."""

    @property
    def name(self) -> str:
        return f"{self.hca} port {self.port}"


class TransferReading(Struct, frozen=True, kw_only=True):
    """Result of one transfer."""

    gbps: float | None = None
    problem: str = ""


def build_argv(rail: Rail, tcp_port: int, seconds: int, address: str = "") -> list[str]:
    """Arguments of a server, or with an `address` those of its client."""
    gid = [] if rail.gid_index is None else ["-x", str(rail.gid_index)]
    words = ["-d", rail.hca, "-i", str(rail.port), "-p", str(tcp_port), "-s", str(MESSAGE_BYTES), "-D", str(seconds)]
    return [PROGRAM, *words, *gid, "-F", "--report_gbits", *([address] if address else [])]


def parse_bandwidth(text: str) -> float | None:
    """Average bandwidth in Gb/s in the row below the header of perftest's table; None without such a row."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        header = re.search(r"#bytes.*?BW average\[([\w/]+)\]", line)
        if header is None or header[1] not in UNITS:
            continue
        columns = re.findall(r"#?\w[\w ]*?(?:\[[\w/]+\])?(?=\s{2,}|$)", line.strip())
        place = next((i for i, column in enumerate(columns) if column.startswith("BW average")), None)
        for row in lines[number + 1 :]:
            words = row.split()
            if place is not None and len(words) > place and all(re.fullmatch(r"\d+(\.\d+)?", word) for word in words):
                return float(words[place]) * UNITS[header[1]]
    return None


def send_data(
    rail: Rail, address: str, tcp_port: int, seconds: int, environ: Mapping[str, str], limit_s: float
) -> TransferReading:
    """Run a client against a server for some seconds."""
    answer = process.run_command(build_argv(rail, tcp_port, seconds, address), environ, limit_s)
    gbps = parse_bandwidth(answer.text) if answer.state == "ok" else None
    return TransferReading(
        gbps=gbps, problem="" if gbps is not None else answer.problem or "its table has no row of figures"
    )


class PerftestServer:
    """A server that waits for one client; `stop` kills it with all its child processes.

    Args:
        rail: The port that it serves.
        seconds: Duration, the same as the client's: perftest compares both.
        environ: Its environment.
        reserved: Ports that it must leave free, such as that of the launch, which no process has bound yet.
    """

    def __init__(
        self, rail: Rail, seconds: int, environ: Mapping[str, str], reserved: Collection[int | None] = ()
    ) -> None:
        # Another program may take the port before perftest binds it. perftest then exits, and its last line becomes
        # the problem.
        self.tcp_port = find_free_port(reserved)
        self.problem = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        program = shutil.which(PROGRAM, path=environ.get("PATH", os.defpath))
        if program is None:
            self.problem = f"{PROGRAM} is not installed"
            return
        words = [program, *build_argv(rail, self.tcp_port, seconds)[1:]]
        try:
            # Own session, so that stop() also ends child processes of a wrapper script.
            self._child = subprocess.Popen(
                words, env=dict(environ), stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.problem = f"{PROGRAM}: {error.strerror}"
            return
        self._wait_until_listening()

    def _wait_until_listening(self) -> None:
        """Wait until the server listens; a client that connects earlier fails."""
        assert self._child is not None
        # States: starting -> listening (return), exited or timed out (problem is set). The caller reads `problem` in
        # any state.
        deadline = time.monotonic() + LISTEN_LIMIT_S
        while not is_listening(self.tcp_port):
            if self._child.poll() is not None:
                self._said.seek(0)
                output = self._said.read().decode(errors="replace").strip()
                self.problem = output.rpartition("\n")[2][:200] or f"{PROGRAM} ended with {self._child.returncode}"
                return
            if time.monotonic() > deadline:
                self.problem = f"{PROGRAM} did not listen within {LISTEN_LIMIT_S:g} s"
                return
            time.sleep(POLL_S)

    def stop(self) -> None:
        if self._child is not None:
            process.end_program(self._child)
        self._said.close()


def is_listening(tcp_port: int, tables: Sequence[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))) -> bool:
    """Whether a program listens on a port of this machine (Linux Documentation/networking/proc_net_tcp)."""
    wanted = re.compile(rf"^\s*\d+: [0-9A-F]+:{tcp_port:04X} [0-9A-F:]+ 0A ", re.MULTILINE)
    for table in tables:
        try:
            if wanted.search(table.read_text()):
                return True
        except OSError:
            continue
    return False


def find_free_port(reserved: Collection[int | None] = ()) -> int:
    """A TCP port that no process has bound, and that is none of `reserved`."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
        # While this port is bound, the kernel gives another one.
        return find_free_port(reserved) if port in reserved else port
