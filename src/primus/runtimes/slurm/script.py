"""Format the batch script of a job, and choose the options with which it is submitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from msgspec import Struct

from primus.runtimes.slurm.options import Options, SlurmOption, find_num_nodes, find_option_value

MAX_LEAD_S, MIN_LEAD_S = 600, 60
"""Time for the last checkpoint before a time limit: 10 minutes for hundreds of nodes that save to a shared file system.
Slurm sends the signal up to a minute early (sbatch(1), --signal)."""
LINE_LIMIT = 1000
"""Longest option in a line of the script; sbatch of Slurm 22.05 rejects lines of a few thousand characters."""


class BatchScript(Struct, frozen=True, kw_only=True):
    """Input of a batch script."""

    options: Options
    run: str
    """Run folder."""
    name: str
    """Default name of the job."""
    step_options: tuple[str, ...] = ()
    """Options of srun with which it starts a container on each node."""
    command: tuple[str, ...]
    """Command that each node runs."""
    primus: str
    """Path of `primus-cli` on the nodes."""
    has_workers: bool = True
    """Whether the task starts workers, so that its nodes depend on each other."""


def step_options(*, with_workers: bool) -> tuple[str, ...]:
    """Options of srun for one launcher on each node.

    Workers depend on each other. Their launchers agree on the end and exit together; --kill-on-bad-exit is for one that
    dies without that, and --wait=60 for one that hangs after the others have exited. Nodes of a task without workers
    are independent: one may take longer than another, or fail alone. 0 means no limit (srun(1)).
    """
    ends = ("--kill-on-bad-exit=1", "--wait=60") if with_workers else ("--kill-on-bad-exit=0", "--wait=0")
    return ("--ntasks-per-node=1", *ends, "--input=none", "--unbuffered")


def split_directives(batch: BatchScript) -> tuple[list[str], list[str]]:
    """Lines of the script's head, and those options that only a command line can hold.

    Each option that was typed has a line; the defaults share the last one.
    """
    typed, defaults = _list_allocation_options(batch)
    lines = [_format_directive(words) for words in typed]
    others = [word for words, line in zip(typed, lines, strict=True) if line is None for word in words]
    head = [f"#SBATCH {line}" for line in lines if line is not None]
    default_lines = [(words, _format_directive(words)) for words in defaults]
    others += [word for words, line in default_lines if line is None for word in words]
    head += ["#SBATCH " + " ".join(line for _, line in default_lines if line is not None)]
    return head, others


def format_batch_script(batch: BatchScript) -> str:
    """The script: its options for Slurm, and the command that supervises the steps of the job."""
    options, typed = batch.options, batch.options.slurm_options
    head, _ = split_directives(batch)
    srun = ["srun", *step_options(with_workers=batch.has_workers)]
    # A task has one core unless --cpus-per-task says more, and srun would bind the launcher with all its ranks to it.
    srun += [] if find_option_value(typed, "cpus-per-task") else ["--cpu-bind=none"]
    srun += batch.step_options
    run_step: list[str] = []
    if not options.is_array:  # the jobs of an array share their work: none has a run, and none restarts
        run_step += ["--run", batch.run, f"--max-restarts={max_restarts(options)}"]
        run_step += [f"--restart-delay={options.restart_delay:g}"]
    if options.spare_nodes:
        run_step += [f"--num-nodes={find_num_nodes(typed) or 1}"]
    run_step += ["--requeue" if options.requeue else "--no-requeue"]
    return _TEMPLATE.format(
        head="\n".join(head),
        # --no-config: the defaults of the launcher file are in `command` already.
        primus=shlex.join([batch.primus, "--no-config", "direct", "--single", "--no-hooks"]),
        options=shlex.join(run_step),
        srun=shlex.join(srun),
        launcher=shlex.join(batch.command),
    )


def max_restarts(options: Options) -> int:
    """Maximum restarts after failures; by default, one for each spare node."""
    return options.spare_nodes if options.max_restarts is None else options.max_restarts


def build_output_pattern(run: str, options: Options) -> str:
    """Default log of the job, below the run folder; a `%` in its name is escaped (sbatch(1), filename pattern)."""
    return f"{run.replace('%', '%%')}/logs/slurm-{'%A_%a' if options.is_array else '%j'}.out"


def limit_s(text: str) -> int | None:
    """Seconds of a time limit in the formats of sbatch(1), --time; None for no limit or an unknown format."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        return None
    days, *parts = (int(part) if part else 0 for part in match.groups())
    if match[1]:
        return ((days * 24 + parts[0]) * 60 + parts[1]) * 60 + parts[2]
    if match[4]:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return parts[0] * 60 + parts[1] or None


def _list_allocation_options(batch: BatchScript) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The options of the job that were typed, and the defaults of those that were not."""
    options, typed = batch.options, batch.options.slurm_options
    # Of the submission, not of the job; with spare nodes, primus asks for their number and keeps the job on a lost one.
    replaced = ("parsable", "test-only", "nodes", "no-kill") if options.spare_nodes else ("parsable", "test-only")
    kept = [each.words for each in typed if each.name not in replaced]
    given = {each.name for each in typed}
    defaults: list[tuple[str, ...]] = []
    if options.spare_nodes:
        defaults += [(f"--nodes={(find_num_nodes(typed) or 1) + options.spare_nodes}",), ("--no-kill",)]
    defaults += [
        (f"--{name}={value}",)
        for name, value in (
            ("job-name", batch.name),
            ("ntasks-per-node", "1"),
            ("output", build_output_pattern(batch.run, options)),
            ("open-mode", "append"),
            ("comment", format_job_comment(batch.run)),
        )
        if name not in given
    ]
    return kept, [*defaults, *_list_warning_signal_options(options, typed)]


def format_job_comment(run: str) -> str:
    """Comment that identifies the job of a run, in case the answer to its submission is lost."""
    return f"primus:{run.rpartition('/')[2]}"


def _list_warning_signal_options(options: Options, typed: Sequence[SlurmOption]) -> list[tuple[str, ...]]:
    """A warning signal before the time limit, to the batch shell alone (B:): run-step passes it to the launchers."""
    time = find_option_value(typed, "time")
    if find_option_value(typed, "signal") is not None or (time is None and not options.requeue):
        return []
    if options.is_array and not options.requeue:  # array tasks save each shard when it is done
        return []
    limit = limit_s(time) if time else None
    # A sixth of the time, so that a short job trains for most of it; never more than half, however short it is.
    lead = MAX_LEAD_S if limit is None else min(MAX_LEAD_S, max(MIN_LEAD_S, limit // 6), limit // 2)
    return [(f"--signal=B:USR1@{lead}",)]


def _format_directive(words: Sequence[str]) -> str | None:
    """`words` as a #SBATCH line holds them; None if sbatch would read something else.

    sbatch splits a line at white space, drops what follows `#`, and understands double quotes with backslashes before
    `"` and itself (observed with 22.05). A value cannot contain a newline.
    """
    if any(not word or re.search(r"[\x00-\x1f\x7f]", word) for word in words) or sum(map(len, words)) > LINE_LIMIT:
        return None
    return " ".join(map(_quote_directive_value, words))


def _quote_directive_value(word: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if re.fullmatch(r"[\w@%+=:,./\[\]*&|!()$`~^{}<>?;-]*", value, re.ASCII):
        return word
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{flag}{equals}"{escaped}"'


_TEMPLATE = r"""#!/bin/bash
{head}

# `jobs run-step` starts a launcher on each node, passes on the warning signal, restarts and requeues. The primus-cli
# of the checkout that all nodes share picks the Python environment for this node, and becomes that process (exec).
trap '' USR1 # ignored until run-step handles it; by default it would end the job
exec {primus} -- jobs run-step \
    {options} -- \
    {srun} \
    {launcher}
"""
