"""Run on several hosts over SSH, without a scheduler; each host is a node."""

from __future__ import annotations

import fnmatch
import re
import shlex
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus.errors import UsageError
from primus.launch import inherited_variables
from primus.launch.command import parse_segment_options
from primus.launch.nodes.avoided_nodes import AvoidedNodes, choose_listed_nodes, report_avoided_nodes
from primus.launch.variables import check_name, is_name, name_typed_variables
from primus.machine.cluster import NODE_NAME_VARIABLE, JobSize
from primus.messages import Say
from primus.plan import LaunchPlan, PlanContext, Variable
from primus.runs.store import Run
from primus.runtime import ClusterNode, NodeJob, RemoteLaunch, RequestSegment
from primus.runtimes.ssh import hosts, script
from primus.runtimes.ssh.hosts import SshHost

LEVEL = "cluster"

FIRST_PORT, NUM_PORTS = 20000, 10000
"""Rendezvous ports, below the range of outgoing connections (ip_local_port_range of Linux, from 32768)."""

LOCAL_PREFIXES = ("SLURM_", "PET_", "NNODES", "NODE_RANK", "MASTER_")
"""Prefixes of variables with the rank of this machine, which the hosts must not inherit."""

RUN = (
    "import runpy, sys; sys.path[:] = [place for place in sys.path if place]; sys.argv[0] = 'primus-cli'; "
    "runpy.run_module('primus', run_name='__main__')"
)
"""Code that `--python` runs: the command line without modules of the working folder, which may contain a `primus`."""


Port = Annotated[int, Meta(ge=1, le=65535)]


class Options(Struct, frozen=True, kw_only=True):
    """Run on several hosts over SSH."""

    hosts: tuple[str, ...] = ()
    """Hosts: a,b,c or node[01-16] or user@host:port; the first one is node 0."""
    hostfile: tuple[str, ...] = ()
    """File with one host per line; may be repeated."""
    spare_nodes: Annotated[int, Meta(ge=0)] = 0
    """Hosts at the end of the list that are used only in the place of unfit ones."""
    unfit_nodes: str | None = None
    """Folder of the list of unfit nodes (default: PRIMUS_UNFIT_NODES, else that of the user)."""
    user: str | None = None
    """User on hosts without a user of their own."""
    port: Port | None = None
    """Port of the SSH server on hosts without a port of their own."""
    option: tuple[str, ...] = ()
    """NAME=VALUE option of ssh (IdentityFile=..., ProxyJump=...), in addition to ~/.ssh/config; may be repeated."""
    env: tuple[str, ...] = ()
    """Variable for the hosts: NAME, a pattern (NCCL_*) or NAME=VALUE; PRIMUS_* are always passed; may be repeated."""
    chdir: str | None = None
    """Working folder on the hosts (default: the current folder)."""
    entry: str | None = None
    """Path of primus-cli on the hosts, if it differs."""
    python: str | None = None
    """Python on the hosts that has primus installed, instead of primus-cli."""
    master_addr: str | None = None
    """Address of node 0 for the other nodes (default: its name for ssh)."""
    master_port: Port | None = None
    """Rendezvous port on node 0 (default: 20000 to 29999, derived from the run's id)."""
    connect_timeout: Annotated[int, Meta(ge=1)] = 15
    """Seconds to wait for a connection to a host."""


def wrap(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    """`plan` on every host, each with its own connection and node rank.

    Raises:
        UsageError: A host or an option is invalid, or a variable is not set.
    """
    nodes, avoided = _choose_hosts(options, context)
    command = _build_remote_command(options, context)
    env, passed_on = _collect_remote_variables(plan, options, context)
    notes = [f"node {rank}: {shlex.join(build_ssh_command(node, options))}" for rank, node in enumerate(nodes) if rank]
    notes += [
        "each host reads its variables (NODE_RANK among them) and the command from standard input",
        f"working folder on the hosts: {_find_remote_directory(options)}; they must share it and the run folder",
    ]
    return LaunchPlan(
        argv=build_ssh_command(nodes[0], options),
        env={**plan.env, **env, **_build_rendezvous_variables(nodes, options, context)},
        inherited=passed_on,
        avoided=avoided.avoided,
        notes=(*notes, *avoided.notes),
        inner=LaunchPlan(argv=command, inner=plan if plan.argv != context.there else plan.inner),
    )


def start(remote: RemoteLaunch, run: Run | None, say: Say) -> int:
    """Start all nodes, and wait until they end; gives the exit code.

    Raises:
        PrimusError: ssh is not installed.
    """
    from primus.runtimes.ssh import nodes

    options = parse_segment_options(remote.request.runtimes[0])
    assert isinstance(options, Options) and remote.plan.inner is not None
    values = {name: remote.context.environ[name] for name in remote.plan.inherited}
    values |= {name: variable.value for name, variable in remote.plan.env.items()}
    directory = _find_remote_directory(options)
    chosen, avoided = _choose_hosts(options, remote.context)
    report_avoided_nodes(avoided, run, say)
    targets = [
        nodes.SshNode(
            host=host,
            argv=build_ssh_command(host, options),
            login=host.format_login(options.option),
            script=script.format_remote_script(
                remote.plan.inner.argv, directory, {**values, "NODE_RANK": str(rank), NODE_NAME_VARIABLE: host.name}
            ),
        )
        for rank, host in enumerate(chosen)
    ]
    return nodes.run_nodes(targets, remote.context.environ, run)


def find_size(options: Options) -> JobSize:
    """A node on each host that is not spare."""
    listed = hosts.parse_hosts(options.hosts, options.hostfile, options.user, options.port)
    return JobSize(nodes=len(listed) - options.spare_nodes)


def _choose_hosts(options: Options, context: PlanContext) -> tuple[tuple[SshHost, ...], AvoidedNodes]:
    """The hosts of the job, and what became of the unfit ones: spare hosts take their places.

    Raises:
        UsageError: A host is invalid, or all of them are spare.
    """
    everything = hosts.parse_hosts(options.hosts, options.hostfile, options.user, options.port)
    num_needed = len(everything) - options.spare_nodes
    if num_needed < 1:
        raise UsageError(f"--spare-nodes {options.spare_nodes}: no host is left", "list more hosts")
    listed = context.find_unfit_nodes(options.unfit_nodes)
    if listed is None:
        return everything[:num_needed], AvoidedNodes()
    found = choose_listed_nodes(listed, [host.name for host in everything], num_needed)
    fit = [host for host in everything if host.name not in found.avoided]
    return tuple(fit[:num_needed]), found


def _parse(words: Sequence[str]) -> Options:
    options = parse_segment_options(RequestSegment("ssh", tuple(words)))
    assert isinstance(options, Options)
    return options


def list_nodes(words: Sequence[str], environ: Mapping[str, str]) -> list[ClusterNode]:
    """The hosts; nobody says whether they are busy."""
    options = _parse(words)
    found = hosts.parse_hosts(options.hosts, options.hostfile, options.user, options.port)
    return [ClusterNode(name=host.name, state="idle") for host in found]


def select_node(words: Sequence[str], job: NodeJob) -> tuple[str, ...]:
    """`words` with this host alone, as it was listed."""
    options = _parse(words)
    listed = hosts.parse_hosts(options.hosts, options.hostfile, None, None) if options.hosts or options.hostfile else ()
    typed = next((host for host in listed if host.name == job.node.name), SshHost(job.node.name))
    user, port = typed.user and f"{typed.user}@", typed.port and f":{typed.port}"
    kept: list[str] = []
    is_replaced = False
    for word in words:  # a list of hosts may be several words
        if word.startswith("-"):
            is_replaced = word.partition("=")[0] in ("--hosts", "--hostfile", "--spare-nodes")
        if not is_replaced:
            kept.append(word)
    return (*kept, f"--hosts={user or ''}{typed.name}{port or ''}")


_OPTION = re.compile(r"[A-Za-z]+=.*", re.DOTALL)


def build_ssh_command(host: SshHost, options: Options) -> tuple[str, ...]:
    """The ssh command for `host`. Of repeated options ssh uses the first, so the user's precede the defaults.

    Raises:
        UsageError: An option is not NAME=VALUE.
    """
    wrong = [word for word in options.option if not _OPTION.fullmatch(word)]
    if wrong:
        raise UsageError(f"--option {wrong[0]}: expected NAME=VALUE", "for example IdentityFile=~/.ssh/cluster")
    # For a repeated option ssh uses the first value (ssh_config(5)): the user's options override all but BatchMode.
    settings = (
        "BatchMode=yes",  # no password prompts: several hosts would ask at once
        *options.option,
        f"ConnectTimeout={options.connect_timeout}",
        "ServerAliveInterval=15",  # a host that does not respond for 45 s (3 probes) counts as lost
        "ServerAliveCountMax=3",
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
    )
    words = [word for setting in settings for word in ("-o", setting)]
    login = ("-l", host.user) if host.user else ()
    port = ("-p", str(host.port)) if host.port else ()
    return ("ssh", "-T", "-x", *words, *login, *port, "--", host.name, script.BOOTSTRAP)


def _find_remote_directory(options: Options) -> str:
    return options.chdir or str(Path.cwd())


def _build_remote_command(options: Options, context: PlanContext) -> tuple[str, ...]:
    if options.entry and options.python:
        raise UsageError("--entry and --python cannot be combined", "use the one that starts primus on the hosts")
    head = (options.python, "-c", RUN) if options.python else (options.entry or context.there[0],)
    return (*head, *context.there[1:])


def _collect_remote_variables(
    plan: LaunchPlan, options: Options, context: PlanContext
) -> tuple[dict[str, Variable], tuple[str, ...]]:
    """Variables that have a value in the options, and names of those that the hosts get from this environment."""
    given: dict[str, Variable] = {}
    names = {
        name
        for name in inherited_variables.list_inherited_names(context.environ)
        if not name.startswith(LOCAL_PREFIXES)
    }
    for word in options.env:
        name, equals, value = word.partition("=")
        found = _match_variables(name, context)
        if equals:
            given[check_name(name, "--env")] = Variable(value, "--env")
        elif not found and name not in plan.env:
            raise UsageError(f"--env {name}: the variable is not set", "set it in your shell, or write NAME=VALUE")
        names |= found
    below: LaunchPlan | None = plan
    while below is not None:  # a container passes variables by name, so its host must have them
        names |= {name for name in below.inherited if name in context.environ}
        below = below.inner
    given |= name_typed_variables(given)
    return given, tuple(sorted(name for name in names - {*given, *plan.env} if is_name(name)))


def _match_variables(pattern: str, context: PlanContext) -> set[str]:
    return {name for name in context.environ if fnmatch.fnmatchcase(name, pattern)}


def _build_rendezvous_variables(
    nodes: tuple[SshHost, ...], options: Options, context: PlanContext
) -> dict[str, Variable]:
    """Variables of the rendezvous, which `direct` reads."""
    if len(nodes) == 1:
        return {"NNODES": Variable("1", "ssh")}
    run = f"{Path(context.directory).name} {context.attempt}"
    # Derived from run and attempt, so that runs of several users on one host rarely share a port, and a restart does
    # not meet sockets of the attempt before it.
    port = options.master_port or FIRST_PORT + zlib.crc32(run.encode()) % NUM_PORTS
    return {
        "NNODES": Variable(str(len(nodes)), "--hosts"),
        "MASTER_ADDR": Variable(
            options.master_addr or nodes[0].name, "--master-addr" if options.master_addr else "ssh"
        ),
        "MASTER_PORT": Variable(str(port), "--master-port" if options.master_port else "ssh: from the run's id"),
    }
