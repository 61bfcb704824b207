"""Follow the log of a pod across lost connections.

The server can resume a log at a time (sinceTime), which it rounds down to the second. Lines carry timestamps, so the
follower remembers the last timestamp and the number of lines with it, and skips what it has written.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from http import HTTPStatus

from primus.runtimes.kubernetes.client import KubernetesClient
from primus.runtimes.kubernetes.names import REPLICATED_JOB
from primus.runtimes.kubernetes.target import RequestRefused, Write

RECONNECT_S = 1.0


class PodLogFollower:
    """Writes each line of the pods of one node exactly once."""

    def __init__(self, server: KubernetesClient, write: Write, tail: int | None) -> None:
        self._server = server
        self._write = write
        self._tail = tail
        self._pod = ""
        self._last = ""
        self._num_at_last = 0
        """Lines with the last timestamp that are written."""

    def read(self, pod: str, *, follow: bool) -> None:
        """Write the new lines of `pod`; with `follow`, until the connection ends, possibly long before the pod does."""
        if pod != self._pod:
            # The pod was replaced: its last lines may have been written after the connection was lost.
            self._write_last_lines()
            self._pod, self._last, self._num_at_last = pod, "", 0
        query = {"container": REPLICATED_JOB, "timestamps": "true"}
        query |= {"follow": "true"} if follow else {}
        if self._last:
            # Takes precedence over the tail, which counts for the first connection only.
            query["sinceTime"] = self._last
        elif self._tail is not None:
            query["tailLines"] = str(self._tail)
        path = f"/api/v1/namespaces/{self._server.namespace}/pods/{pod}/log"
        try:
            self._write_new(self._server.stream_lines(path, **query))
        except RequestRefused as error:
            if error.status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND) or not follow:
                raise
            time.sleep(RECONNECT_S)  # the container has not started yet, or the pod has been replaced

    def _write_last_lines(self) -> None:
        """Write the last lines of the previous pod, if it still exists."""
        if self._pod:
            with contextlib.suppress(RequestRefused):
                self.read(self._pod, follow=False)

    def _write_new(self, lines: Iterable[str]) -> None:
        """Write `lines`, except those that were written before a connection was lost."""
        # The server repeats all lines of the last second; these two say where the unwritten ones begin.
        known, num_known = self._last, self._num_at_last
        for line in lines:
            moment, _, text = line.partition(" ")
            if moment < known:  # timestamps (RFC 3339, nine digits) compare as text
                continue
            if moment == known and num_known:
                num_known -= 1
                continue
            self._num_at_last = self._num_at_last + 1 if moment == self._last else 1
            self._last = moment
            self._write(text)
