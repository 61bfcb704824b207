"""The batch script of a job, and the words with which it is submitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from msgspec import Struct

from primus.runtimes.slurm.options import Options, SlurmOption, find_num_nodes, find_option_value

MAX_LEAD_S, MIN_LEAD_S = 600, 60
"""Time for the last checkpoint before a time limit. Slurm sends the signal up to a minute early (sbatch(1))."""
PATIENCE_S = 5
"""Time that srun has to end once the launchers have; a step whose node was lost does not end by itself."""
LINE_LIMIT = 1000
"""Longest option on a line of the script; sbatch of Slurm 22.05 refuses lines of a few thousand characters."""


class BatchScript(Struct, frozen=True, kw_only=True):
    """What a batch script is made from."""

    options: Options
    run: str
    """Run folder."""
    name: str
    """What the job is called where its user does not say."""
    command: tuple[str, ...]
    """What each node starts."""
    primus: str
    """The `primus-cli` of the cluster's nodes."""
    has_workers: bool = True
    """Whether the task starts workers, so that its nodes depend on each other."""


def step_options(*, with_workers: bool) -> tuple[str, ...]:
    """Options of srun for one launcher on each node.

    The launchers of a job with workers leave together: where one fails all the same the others end, and where one has
    gone the others have a minute. Without workers each node does what it does, and may take longer than another one, or
    fail alone; no node is ended for that (srun(1), --kill-on-bad-exit and --wait, 0 of which is no limit).
    """
    ends = ("--kill-on-bad-exit=1", "--wait=60") if with_workers else ("--kill-on-bad-exit=0", "--wait=0")
    return ("--ntasks-per-node=1", *ends, "--input=none", "--unbuffered")


def split_directives(batch: BatchScript) -> tuple[list[str], list[str]]:
    """Lines of the script's head, and those options that only a command line can hold."""
    lines: list[str] = []
    others: list[str] = []
    for words in _list_allocation_options(batch):
        line = _format_directive(words)
        if line is None:
            others += words
        else:
            lines.append(line)
    return lines, others


def format_batch_script(batch: BatchScript) -> str:
    """The script: one launcher on each node, again after what can be survived; of an array, once."""
    options, typed = batch.options, batch.options.slurm_options
    head, _ = split_directives(batch)
    step = " ".join(
        [
            *step_options(with_workers=batch.has_workers),
            *([] if find_option_value(typed, "cpus-per-task") else ["--cpu-bind=none"]),
        ]
    )
    if options.is_array:
        return _ARRAY_TEMPLATE.format(
            head="\n".join(head),
            step=step,
            command=_format_bash_array(batch.command),
            inherit=_INHERIT,
            requeue=_REQUEUE if options.requeue else "",
        )
    num_nodes = find_num_nodes(typed)
    nodes = "$SLURM_JOB_NUM_NODES" if num_nodes is None or not options.spare_nodes else str(num_nodes)
    next_words = [batch.primus, "direct", "--single", "--no-hooks", "--", "jobs", "next", batch.run]
    next_words += [f"--max-restarts={max_restarts(options)}", f"--restart-delay={options.restart_delay:g}"]
    next_words += ["--can-requeue"] if options.requeue else []
    return _TEMPLATE.format(
        head="\n".join(head),
        run=shlex.quote(batch.run),
        nodes=nodes,
        step=step,
        command=_format_bash_array(batch.command),
        next=_format_bash_array(next_words),
        patience=PATIENCE_S,
        inherit=_INHERIT,
        requeue=_REQUEUE if options.requeue else "",
    )


def max_restarts(options: Options) -> int:
    """Restarts after failures; somebody who keeps spare nodes wants them used."""
    return options.spare_nodes if options.max_restarts is None else options.max_restarts


def output_pattern(run: str, options: Options) -> str:
    """The job's log where its user names none: below the run folder, whose name Slurm must not take for a pattern."""
    return f"{run.replace('%', '%%')}/logs/slurm-{'%A_%a' if options.is_array else '%j'}.out"


def limit_s(text: str) -> int | None:
    """Seconds of a time limit as sbatch(1) writes it; None for none, or where it cannot be read."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        return None
    days, *parts = (int(part) if part else 0 for part in match.groups())
    if match[1]:
        return ((days * 24 + parts[0]) * 60 + parts[1]) * 60 + parts[2]
    if match[4]:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return parts[0] * 60 + parts[1] or None


def _list_allocation_options(batch: BatchScript) -> list[tuple[str, ...]]:
    """The options of the job: those that were typed, and what goes without saying."""
    options, typed = batch.options, batch.options.slurm_options
    kept = [each.words for each in typed if not _is_replaced(each, options)]
    given = {each.name for each in typed}
    ours: list[tuple[str, ...]] = []
    if options.spare_nodes:
        ours += [(f"--nodes={(find_num_nodes(typed) or 1) + options.spare_nodes}",), ("--no-kill",)]
    ours += [
        (f"--{name}={value}",)
        for name, value in (
            ("job-name", batch.name),
            ("ntasks-per-node", "1"),
            ("output", output_pattern(batch.run, options)),
            ("open-mode", "append"),
            ("comment", format_job_comment(batch.run)),
        )
        if name not in given
    ]
    return [*kept, *ours, *_list_warning_signal_options(options, typed)]


def format_job_comment(run: str) -> str:
    """Text by which a job is found whose submission was not answered."""
    return f"primus:{run.rpartition('/')[2]}"


def _is_replaced(each: SlurmOption, options: Options) -> bool:
    return each.name in ("parsable", "test-only") or (each.name in ("nodes", "no-kill") and options.spare_nodes > 0)


def _list_warning_signal_options(options: Options, typed: Sequence[SlurmOption]) -> list[tuple[str, ...]]:
    """A signal ahead of the end, to the script alone: it tells the launchers."""
    time = find_option_value(typed, "time")
    if find_option_value(typed, "signal") is not None or (time is None and not options.requeue):
        return []
    if options.is_array and not options.requeue:  # nothing is to be saved that is not saved already
        return []
    limit = limit_s(time) if time else None
    lead = MAX_LEAD_S if limit is None else min(MAX_LEAD_S, max(MIN_LEAD_S, limit // 6), limit // 2)
    return [(f"--signal=B:USR1@{lead}",)]


def _format_directive(words: Sequence[str]) -> str | None:
    """The line of the script that says `words`; None where sbatch would read it otherwise.

    sbatch cuts a line at white space and at `#`, and takes double quotes with backslashes before `"` and itself
    (tried with 22.05); a line ends with the line.
    """
    if any(not word or re.search(r"[\x00-\x1f\x7f]", word) for word in words) or sum(map(len, words)) > LINE_LIMIT:
        return None
    return " ".join(["#SBATCH", *map(_quote_directive_value, words)])


def _quote_directive_value(word: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if re.fullmatch(r"[\w@%+=:,./\[\]*&|!()$`~^{}<>?;-]*", value, re.ASCII):
        return word
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{flag}{equals}"{escaped}"'


def _format_bash_array(words: Sequence[str]) -> str:
    """`words` as the inside of a bash array, an option a line with what follows it."""
    lines: list[list[str]] = []
    for word in words:
        if not lines or (word.startswith("-") and word != "--") or lines[-1][-1:] == ["--"]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return "\n".join("    " + " ".join(line) for line in lines)


_REQUEUE = """scontrol requeue "$SLURM_JOB_ID" && exec sleep 600 # in which Slurm ends the script
    """

_INHERIT = """export SLURM_EXPORT_ENV=ALL # steps start empty where the job was submitted with --export=NONE
# srun has not inherited the cores of a task since 22.05.
[ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"""

_ARRAY_TEMPLATE = r"""#!/bin/bash
{head}

# Each job of the array starts one launcher on each of its nodes; what a job leaves undone, the others may do.
set -uo pipefail

launcher=(
{command}
)

{inherit}

# The end of the job is announced: the step ends, and what it has not done is for another one.
warned=
step=
on_warning() {{
    warned=yes
    echo "primus: the end of job $SLURM_JOB_ID is announced: its processes end" >&2
    [ -z "$step" ] || kill -TERM "$step"
}}
trap on_warning USR1

queue_again() {{
    {requeue}exit "$((code ? code : 1))"
}}

echo "primus: job $SLURM_JOB_ID, ${{SLURM_ARRAY_TASK_ID-}} of array ${{SLURM_ARRAY_JOB_ID-}}, starts" >&2
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    {step} \
    "${{launcher[@]}}" &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a trap ends `wait` early
wait "$step"
code=$?
((code)) || exit 0
[ -z "$warned" ] || queue_again
exit "$code"
"""

_TEMPLATE = r"""#!/bin/bash
{head}

# Each node starts one launcher; when a step of the job has ended, `primus-cli jobs next` says what follows.
set -uo pipefail

run={run}
num_nodes={nodes}
launcher=(
{command}
)
next=(
{next}
)

{inherit}

# The end of the job is announced: the launchers save and end. A plain `scancel` reaches them by itself.
warned=
step=
on_warning() {{
    warned=yes
    echo "primus: the end of job $SLURM_JOB_ID is announced: its processes save and end" >&2
    [ -z "$step" ] || kill -USR1 "$step"
}}
trap on_warning USR1

# srun waits for a node that has died until Slurm has noticed (SlurmdTimeout). The other launchers know at once, do
# their hooks, and leave together.
num_partings() {{ grep -c '"kind":"nodes_left"' "$run/events.jsonl" 2>/dev/null; }}
watch() {{
    local before
    before=$(num_partings)
    until (($(num_partings) > ${{before:-0}})); do sleep 1; done
    sleep {patience}
    kill -TERM "$1" 2>/dev/null && sleep 2
    kill -KILL "$1" 2>/dev/null
}}

queue_again() {{
    {requeue}exit "$((code ? code : 1))"
}}

excluded=
while :; do
    echo "primus: job $SLURM_JOB_ID starts on $num_nodes nodes${{excluded:+ without $excluded}}" >&2
    # --overlap: the step before may still count as running on a node that is gone.
    srun --nodes="$num_nodes" --ntasks="$num_nodes" --overlap \
        {step} \
        ${{excluded:+--exclude="$excluded"}} "${{launcher[@]}}" &
    step=$!
    watch "$step" &
    watcher=$!
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a trap ends `wait` early
    wait "$step"
    code=$?
    step=
    kill "$watcher" 2>/dev/null
    answer=$("${{next[@]}}" --exit-code="$code" --num-nodes="$num_nodes" ${{warned:+--warned}} \
        ${{excluded:+--excluded="$excluded"}}) || exit "$((code ? code : 1))"
    read -r action value nodes <<<"$answer"
    case $action in
        finish) exit 0 ;;
        restart)
            excluded=$nodes
            sleep "$value" &
            wait $!
            [ -z "$warned" ] || queue_again
            ;;
        requeue) queue_again ;;
        *) exit "${{value:-1}}" ;;
    esac
done
"""
