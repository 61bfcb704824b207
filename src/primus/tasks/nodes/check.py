"""Run preflight on one node, and clear the node if it is fit; words after the node go to preflight."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from primus.config.flags import Positional
from primus.errors import EXIT_OK, EXIT_UNFIT, PrimusError, UsageError
from primus.machine.cluster import find_node_name
from primus.preflight.report.unfit_list import record_unfit_node
from primus.preflight.session import OtherPreflight
from primus.runs import unfit_nodes
from primus.task import TaskContext
from primus.tasks.nodes._list_folder import choose_list

PASSES_WORDS = True
NODE_OPTIONS = {"slurm": ("--nodes=1", "--nodelist={node}"), "ssh": ("--hosts={node}",)}
"""Options of the runtimes that wait for their tasks, for one node."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `nodes check`."""

    node: Positional = ""
    """Name of the node; other words, such as --level full, are passed to preflight."""
    runtime: str = ""
    """How to reach the node: 'slurm srun -p gpu', or 'ssh --user me' (default: slurm srun where Slurm is installed)."""
    unfit_nodes: str | None = None
    """Folder of the list (default: PRIMUS_UNFIT_NODES, else that of the user)."""


def run(options: Options, context: TaskContext) -> int:
    """Check the node, and record the result in the list; gives 0 if it is fit, and 3 if not.

    Raises:
        UsageError: There is no node, or no runtime that reaches it.
        PrimusError: Preflight could not be run there.
    """
    if not options.node:
        raise UsageError("nodes check needs a node", "nodes check n3 --level full")
    unfit_nodes.check_node_name(options.node)
    context = msgspec.structs.replace(context, environ=choose_list(context.environ, options.unfit_nodes))
    command = _build_command(options, context)
    context.say(f"runs: primus-cli {shlex.join(command)}")
    found = _run_preflight(command, context.environ)
    reasons = [reason for each in found.reasons.values() for reason in each]
    if found.verdict == "pass":
        cleared = unfit_nodes.clear_node(context.environ, options.node, "preflight passed", "preflight")
        text = "is fit, and not in the list any more" if cleared else "is fit"
    elif found.verdict == "fail":
        record_unfit_node(options.node, reasons, "", context)
        text = "is unfit"
    else:  # what could not be checked says nothing of the node, for or against it
        text = "could not be checked completely, and stays in the list if it is there"
    context.result(
        {"node": options.node, "verdict": found.verdict, "reasons": reasons},
        "".join([f"{options.node} {text}", *(f"\n  {reason}" for reason in reasons)]),
    )
    return EXIT_OK if found.verdict == "pass" else EXIT_UNFIT


def _build_command(options: Options, context: TaskContext) -> list[str]:
    """Words of the command that runs preflight on the node."""
    task = ["--", "preflight", "--no-record-unfit", *context.overrides]
    if not options.runtime and unfit_nodes.is_same_node(options.node, find_node_name()):
        return ["direct", *task]
    has_slurm = shutil.which("srun", path=context.environ.get("PATH")) is not None
    words = shlex.split(options.runtime) or (["slurm", "srun"] if has_slurm else [])
    if not words:
        hint = "nodes check n3 --runtime 'ssh --user me', or run preflight there and then nodes remove n3"
        raise UsageError("nodes check needs --runtime: there is no Slurm here", hint)
    if words[0] not in NODE_OPTIONS:
        raise UsageError(f"--runtime {words[0]}: nodes check uses {' or '.join(NODE_OPTIONS)}", "see docs/nodes.md")
    return [*words, *(word.format(node=options.node) for word in NODE_OPTIONS[words[0]]), *task]


def _run_preflight(command: Sequence[str], environ: Mapping[str, str]) -> OtherPreflight:
    """Run it with its progress on standard error; gives its verdict.

    Raises:
        PrimusError: It gave no verdict.
    """
    argv = [sys.executable, "-m", "primus", "--json", *command]
    done = subprocess.run(argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    try:
        return msgspec.json.decode(done.stdout[done.stdout.index(b"{") :], type=OtherPreflight)
    except (ValueError, msgspec.MsgspecError):
        raise PrimusError(
            f"preflight gave no verdict (exit code {done.returncode})", "the lines above say why; nothing is recorded"
        ) from None
