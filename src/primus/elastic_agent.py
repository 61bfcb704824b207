"""`python -m primus.elastic_agent --report=FILE ... WORKER ARGUMENT...`: the ranks of one node, under torchelastic.

The agent of torchrun (torch.distributed.elastic.agent.server.LocalElasticAgent) starts the ranks and watches them. This
module adds a report: how each rank ended, as JSON, written before the agent stops the other ranks.

`primus.runtimes.direct` composes this command.

Two processes stop ranks, each for its own reason. The launcher, the parent of this process, enforces every time limit:
the grace for a last checkpoint, the time that the peers of a failed rank get, the end of a hang. It kills this process
and all ranks when the time is up. The agent passes on a signal that reaches it directly, and waits for the ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from msgspec import structs
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters

from primus.errors import EXIT_FAILED, EXIT_OK
from primus.launch.supervision.agent_report import AgentReport, RankExit
from primus.runs.files import write_json

RENDEZVOUS_TIMEOUT_S = 900
"""Default of torchrun (torch/distributed/launcher/api.py, LaunchConfig)."""
MONITOR_INTERVAL_S = 0.1
"""Time between two looks at the ranks; the default of torchrun."""
STOP_LIMIT_S = 24 * 3600
"""Time that ranks have to stop after a signal, in place of 30 s: a checkpoint may take longer, and a warning of the
scheduler leaves as much time as the scheduler wants. The launcher ends the wait."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torchelastic handles (PContext.start)."""


class InheritedOutput(LogsSpecs):
    """Ranks inherit the agent's output, and write their own logs and errors: torchelastic creates no files."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        none = dict.fromkeys(envs, "")
        return LogsDest(stdouts=none, stderrs=none, error_files=none)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class ReportWriter:
    """Replaces the report file by an updated one."""

    def __init__(self, path: Path) -> None:
        self.report = AgentReport()
        self._path = path

    def update(self, **changes: Any) -> None:
        self.report = structs.replace(self.report, **changes)
        write_json(self._path, self.report)


class ReportingAgent(LocalElasticAgent):
    """Agent of torchrun that reports how its ranks end.

    torchelastic calls its methods from the main thread: `_monitor_workers` every `MONITOR_INTERVAL_S` while ranks run,
    `_shutdown` once afterwards. A signal raises `SignalException` in between, anywhere.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, writer: ReportWriter) -> None:
        super().__init__(spec, logs_specs)
        self._writer = writer
        self._last_look = time.time()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # First, because the agent stops all other ranks in the same call in which it finds one that failed.
        self._report_exits(worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        exits = self._writer.report.exits
        if result.is_failed() and not any(each.exit_code for each in exits):
            # A rank failed between the two looks: the first failure is the cause, the others were stopped.
            rank, failure = min(result.failures.items(), key=lambda each: each[1].timestamp)
            found = RankExit(rank=rank, exit_code=failure.exitcode, last_alive=self._last_look)
            self._writer.update(exits=(*exits, found))
        return result

    def _report_exits(self, worker_group: WorkerGroup) -> None:
        exits = self._writer.report.exits
        known = {each.rank for each in exits}
        ended = [
            RankExit(rank=worker.global_rank, exit_code=code, last_alive=self._last_look)
            for worker in worker_group.workers
            if worker.global_rank not in known and (code := _find_exit_code(worker.id)) is not None
        ]
        # Written at once: from here the launcher may kill this process at any time.
        self._last_look = time.time()
        if ended:
            self._writer.update(exits=(*exits, *ended))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        # Schedulers signal a process several times; a second exception would end the wait for the ranks' checkpoint.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if death_sig == signal.SIGHUP:  # ranks save on SIGTERM, but SIGHUP ends them
            death_sig = signal.SIGTERM
        if self._pcontext is not None:
            self._pcontext.close(death_sig, STOP_LIMIT_S)
        super()._shutdown(death_sig, *args, **kwargs)


def _find_exit_code(pid: int) -> int | None:
    """Exit code of a child that ended; the child stays a zombie, which torchelastic waits for."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return None
    try:
        # WNOWAIT leaves the status of the child for torchelastic, which would otherwise lose the exit code.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def main(argv: list[str]) -> int:
    """Run the ranks of this node until all have ended; gives the exit code."""
    options = _parse_arguments(argv)
    writer = ReportWriter(options.report)
    try:
        spec = _make_worker_spec(options)
        result = ReportingAgent(spec, InheritedOutput(), writer).run()
    except SignalException as error:
        # The launcher reads from the report whether a signal or a failure has ended the agent.
        writer.update(signal=error.sigval.name)
        return 128 + error.sigval
    except Exception as error:
        writer.update(error=f"{type(error).__name__}: {error}")
        raise
    spec.rdzv_handler.shutdown()  # not after a signal: that would end the rendezvous for other nodes, which save
    return EXIT_OK if result is not None and result.state == WorkerState.SUCCEEDED else EXIT_FAILED


def _parse_arguments(argv: list[str]) -> Namespace:
    """Parse options with the spelling of torchrun, followed by the worker."""
    parser = ArgumentParser(prog="primus.elastic_agent")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port", type=int)
    parser.add_argument("--rdzv-backend", default="static")
    parser.add_argument("--rdzv-endpoint")
    parser.add_argument("--rdzv-id", default="none")
    parser.add_argument("--rdzv-conf", type=lambda text: dict([text.split("=")]), default={}, metavar="NAME=VALUE")
    parser.add_argument("worker", nargs=REMAINDER)
    return parser.parse_args(argv)


def _make_worker_spec(options: Namespace) -> WorkerSpec:
    rank = {} if options.node_rank is None else {"rank": options.node_rank}
    parameters = RendezvousParameters(
        backend=options.rdzv_backend,
        endpoint=options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}",
        run_id=options.rdzv_id,
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        timeout=RENDEZVOUS_TIMEOUT_S,
        **rank,
        **options.rdzv_conf,
    )
    return WorkerSpec(
        role="default",
        local_world_size=options.nproc_per_node,
        entrypoint=sys.executable,
        args=("-u", *options.worker),
        rdzv_handler=rendezvous_registry.get_rendezvous_handler(parameters),
        max_restarts=0,  # the launcher restarts the ranks of all nodes together
        monitor_interval=MONITOR_INTERVAL_S,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
