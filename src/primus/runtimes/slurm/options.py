"""Parse the arguments of a Slurm command: options of primus, options of Slurm, and the values that primus reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from primus.errors import UsageError, did_you_mean, find_nearest
from primus.redaction import is_secret_name
from primus.runtimes.slurm.placement import check_placement

COMMANDS = ("srun", "sbatch")

# Options in sbatch(1) and srun(1), Slurm 22.05 to 24.11. An unknown option is passed through as well, with the next
# argument if that is not an option: sites add options by SPANK plug-ins.
VALUED = frozenset(
    """
    account acctg-freq array bb bbf bcast bcast-exclude begin chdir cluster-constraint clusters comment constraint
    container container-id core-spec cores-per-socket cpu-bind cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution epilog error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags het-group hint input job-name jobid licenses mail-type
    mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus mpi network nodefile nodelist nodes ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output partition power prefer priority
    profile prolog qos relative reservation resv-ports segment signal slurmd-debug sockets-per-node switches
    task-epilog task-prolog thread-spec threads threads-per-core time time-min tmp tres-bind tres-per-task tree-width
    tune uid wait-all-nodes wckey wrap
    """.split()
)
BARE = frozenset(
    """
    contiguous disable-status exact hold ignore-pbs label multi-prog no-allocate no-kill no-requeue overcommit overlap
    oversubscribe parsable preserve-env pty quiet quit-on-interrupt reboot requeue spread-job stepmgr test-only
    unbuffered usage use-min-nodes verbose version whole
    """.split()
)
OPTIONAL = frozenset("compress exclusive get-user-env immediate kill-on-bad-exit nice propagate send-libs".split())
"""Options whose optional value follows `=`."""

PYXIS_VALUED = frozenset(
    f"container-{name}" for name in ("image", "mounts", "workdir", "name", "save", "env", "unshare")
)
PYXIS_BARE = frozenset(
    f"{no}container-{name}" for no in ("", "no-") for name in ("mount-home", "remap-root", "entrypoint")
) | {"container-entrypoint-log", "container-writable", "container-readonly"}
"""Options of srun and sbatch that the plug-in pyxis adds (its README, version 0.24)."""

LETTERS = {
    "a": "array", "A": "account", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "E": "preserve-env", "F": "nodefile", "G": "gpus", "H": "hold",
    "i": "input", "I": "immediate", "J": "job-name", "k": "no-kill", "K": "kill-on-bad-exit", "l": "label",
    "L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes", "o": "output",
    "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "r": "relative", "s": "oversubscribe",
    "S": "core-spec", "t": "time", "T": "threads", "u": "unbuffered", "v": "verbose", "V": "version", "w": "nodelist",
    "W": "wait", "x": "exclude", "X": "disable-status", "Z": "no-allocate",
}  # fmt: skip

SPELLINGS = {f"--{name}": f"--{name}" for name in VALUED | BARE | OPTIONAL | PYXIS_VALUED | PYXIS_BARE} | {
    f"-{letter}": f"--{name}" for letter, name in LETTERS.items()
}
"""Long names of Slurm's options by each spelling."""

INSTEAD = {
    "scancel": "primus-cli direct -- jobs cancel JOB",
    "squeue": "primus-cli direct -- jobs list",
    "sacct": "primus-cli direct -- jobs list --all",
    "scontrol": "primus-cli direct -- jobs show JOB",
    "sattach": "primus-cli direct -- jobs logs JOB --follow",
    "salloc": "salloc itself, then slurm srun inside",
}
"""Commands of primus for those of Slurm that this runtime does not take."""

NODE_COUNT = re.compile(r"\d+[km]?([-:,]\d+[km]?)*", re.IGNORECASE)
"""A number, range or list of numbers (sbatch(1), --nodes); k and m multiply by 1,024 and 1,048,576."""

REFUSED = {
    "wrap": "write the task after ' -- '",
    "multi-prog": "write the task after ' -- '",
    "ignore-pbs": "the batch script has no #PBS lines",
}


class SlurmOption(Struct, frozen=True):
    """An option of Slurm as it was typed."""

    name: str
    """In full, without dashes."""
    value: str | None
    words: tuple[str, ...]


class Options(Struct, frozen=True, kw_only=True):
    """Run on a Slurm cluster, one launcher on each node."""

    command: Annotated[Literal["srun", "sbatch"], Meta(extra={"positional": True})] = "srun"
    """srun: run in the foreground; sbatch: submit a batch job."""
    slurm: Annotated[tuple[str, ...], Meta(extra={"positional": True})] = ()
    """Options of srun or sbatch, passed through: -N 2, -p gpu, --time=2:00:00, --exclusive, ..."""
    follow: bool = False
    """sbatch: print the job's log as it grows; Ctrl-C leaves the job running."""
    wait: bool = False
    """sbatch: wait until the job ends, and exit with its exit code."""
    requeue: bool = False
    """sbatch: requeue the job after a preemption, its time limit or the loss of a node; it resumes from its newest
    checkpoint."""
    chain: int = 1
    """sbatch: number of jobs that continue the run one after the other, each with the time limit --time; the jobs left
    over when the run ends are cancelled."""
    max_restarts: int | None = None
    """sbatch: maximum restarts after failures (default: the number of --spare-nodes)."""
    restart_delay: float = 30.0
    """sbatch: seconds before the first restart; doubled for each further one without progress."""
    spare_nodes: int = 0
    """sbatch: nodes to allocate beyond --nodes; they replace lost nodes."""
    unfit_nodes: str | None = None
    """Folder of the list of unfit nodes, which the job avoids (default: PRIMUS_UNFIT_NODES, else that of the user)."""
    placement: str | None = None
    """Where the nodes shall stand: near (few switches), leaf or block (required), any."""
    test_only: bool = False
    """Ask Slurm whether and when the job could start; submit nothing."""

    @property
    def is_array(self) -> bool:
        """Whether the job is an array: several jobs that run the same command."""
        return find_option_value(self.slurm_options, "array") is not None

    @property
    def num_placed_nodes(self) -> int:
        """Nodes of the allocation, spare ones included, where `--nodes` is a number."""
        return (find_num_nodes(self.slurm_options) or 1) + self.spare_nodes

    @property
    def slurm_options(self) -> tuple[SlurmOption, ...]:
        """The options of Slurm, in order."""
        return tuple(_parse_slurm_options(list(self.slurm), self.command))


def parse(words: Sequence[str]) -> Options:
    """Read the arguments of the runtime.

    Raises:
        UsageError: An argument is not an option, or an option cannot be used here.
    """
    rest = list(words)
    command = rest.pop(0) if rest and rest[0] in COMMANDS else "srun"
    ours, rest = _split_own_options(rest, command)
    typed = _parse_slurm_options(rest, command)
    _check_slurm_options(typed)
    flags = {each.name for each in typed}
    for name in ("requeue", "test-only"):
        if name in flags:
            ours[name.replace("-", "_")] = True
    options = Options(command=command, slurm=tuple(word for each in typed for word in each.words), **ours)  # type: ignore[arg-type]
    _check_ours(options)
    return options


def split_pyxis_options(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split `words` into those for Slurm, and options of pyxis as words of the runtime `container`.

    Slurm would start the batch script itself in the container, and the container would lack the checkout and the run.
    """
    kept: list[str] = []
    moved: list[str] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        name = word[2:].partition("=")[0] if word.startswith("--") else ""
        if name not in PYXIS_VALUED | PYXIS_BARE:
            kept += [word, *_take_option_value(word, pending)]
            continue
        if name in PYXIS_VALUED and "=" not in word:
            if not pending:
                raise UsageError(f"slurm: {word} needs a value")
            word = f"{word}={pending.pop(0)}"
        moved.append(word.replace("--container-image=", "--image="))
    return tuple(kept), ("--engine", "pyxis", *moved) if moved else ()


def find_option_value(typed: Iterable[SlurmOption], *names: str) -> str | None:
    """Value of the last option in `typed` with one of `names`: empty without a value, None without such an option."""
    found = [each.value or "" for each in typed if each.name in names]
    return found[-1] if found else None


def find_least_nodes(typed: Sequence[SlurmOption]) -> int:
    """Number of nodes without which the job cannot start: that of --nodes, or the beginning of its range."""
    text = re.match(r"\d*", find_option_value(typed, "nodes") or "1")
    return int(text[0]) if text and text[0] else 1


def find_num_nodes(typed: Sequence[SlurmOption]) -> int | None:
    """Number of requested nodes; None if --nodes is a range."""
    text = find_option_value(typed, "nodes")
    return 1 if text is None else int(text) if text.isdecimal() else None


_OURS: dict[str, type] = {
    "follow": bool, "wait": bool, "chain": int, "max-restarts": int, "restart-delay": float, "spare-nodes": int,
    "unfit-nodes": str, "placement": str,
}  # fmt: skip
KNOWN = VALUED | BARE | OPTIONAL | frozenset(_OURS)
"""Options of Slurm and ours."""


def _split_own_options(words: Sequence[str], command: str) -> tuple[dict[str, object], list[str]]:
    """Options of primus and the other arguments; srun's own `--wait` takes a number of seconds."""
    ours: dict[str, object] = {}
    rest: list[str] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("_", "-") if flag.startswith("--") else "wait" if word == "-W" else ""
        kind = _OURS.get(name)
        if kind is None or (name == "wait" and command == "srun"):
            rest += [word, *_take_option_value(word, pending)]
            continue
        if kind is bool and equals:
            raise UsageError(f"{command}: {flag} takes no value")
        if kind is not bool and not equals:
            if not pending:
                raise UsageError(f"runtime 'slurm': {flag} needs a {'value' if kind is str else 'number'}")
            value = pending.pop(0)
        ours[name.replace("-", "_")] = value if kind is str else kind is bool or _parse_number(kind, value, flag)
    return ours, rest


def _parse_number(kind: type, text: str, flag: str) -> float:
    try:
        number: float = kind(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1e9:
        raise UsageError(f"runtime 'slurm': {flag} {text}: not a number from 0")
    return number


def _take_option_value(word: str, pending: list[str]) -> list[str]:
    """Remove the value of the option `word` from the head of `pending`, and return it in a list."""
    name, has_value = _expand_option_name(word)
    if name is None or has_value or name in BARE or name in OPTIONAL or not pending:
        return []
    is_known = name in VALUED or name == "wait"
    return [pending.pop(0)] if is_known or not pending[0].startswith("-") else []


def _parse_slurm_options(words: Sequence[str], command: str) -> list[SlurmOption]:
    """`words` as options of Slurm.

    Raises:
        UsageError: A word is not an option, or lacks its value.
    """
    found: list[SlurmOption] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        name, has_value = _expand_option_name(word)
        if name is None:
            raise _build_unknown_word_error(word, found, command)
        value = _take_option_value(word, pending)
        if not has_value and not value and name in VALUED:
            raise UsageError(f"{command}: {word} needs a value")
        attached = (word.partition("=")[2] if word.startswith("--") else word[2:]) if has_value else None
        found.append(SlurmOption(name, value[0] if value else attached, (word, *value)))
    return found


def _expand_option_name(word: str) -> tuple[str | None, bool]:
    """Full name of the option `word` (None if it is not an option), and whether the word contains the value."""
    if word.startswith("--") and len(word) > 2:
        name, equals, _ = word[2:].partition("=")
        return _complete_option_name(name), bool(equals)
    match = re.fullmatch(r"-([A-Za-z])(.*)", word, re.DOTALL)
    if not match:
        return None, False
    name = LETTERS.get(match[1], match[1])
    return name, bool(match[2]) and name not in BARE


def _complete_option_name(name: str) -> str:
    """Full name of the option `name`, which may be abbreviated as in getopt_long(3)."""
    if name in KNOWN:
        return name
    longer = [each for each in VALUED | BARE | OPTIONAL | {"wait"} if each.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def _build_unknown_word_error(word: str, before: Sequence[SlurmOption], command: str) -> UsageError:
    if not before and word in INSTEAD:
        return UsageError(f"slurm: unsupported command '{word}' (use {' or '.join(COMMANDS)})", f"use {INSTEAD[word]}")
    if not before and find_nearest(word, COMMANDS):
        return UsageError(f"unknown Slurm command '{word}'", did_you_mean(word, COMMANDS))
    after = f" after {' '.join(before[-1].words)}" if before else ""
    dashed = find_nearest(word, KNOWN)
    hint = f"did you mean '--{dashed}'?" if dashed else "write the task, or the next runtime, after ' -- '"
    return UsageError(f"{command}: '{word}'{after} is not an option", hint)


def _check_slurm_options(typed: Sequence[SlurmOption]) -> None:
    for each in typed:
        if each.name in REFUSED:
            raise UsageError(f"slurm: {each.words[0].partition('=')[0]} cannot be used here", REFUSED[each.name])
    for assignment in (find_option_value(typed, "export") or "").split(","):
        name, equals, _ = assignment.partition("=")
        if equals and is_secret_name(name):
            raise UsageError(
                f"slurm: --export: the value of {name} would be readable by everyone on the cluster",
                f"set {name} in your shell: the job inherits its variables",
            )
    given_nodes = find_option_value(typed, "nodes")
    if given_nodes is not None and not NODE_COUNT.fullmatch(given_nodes):
        raise UsageError(f"slurm: --nodes {given_nodes}: not a number of nodes", "such as -N 2, or a range: -N 2-4")
    per_node, tasks, nodes = (
        find_option_value(typed, "ntasks-per-node"),
        find_option_value(typed, "ntasks"),
        find_num_nodes(typed),
    )
    if per_node not in (None, "1") or (tasks is not None and nodes is not None and tasks != str(nodes)):
        raise UsageError(
            "slurm: Slurm starts one launcher on each node, which starts one process for each device",
            "remove --ntasks and --ntasks-per-node; -- direct --nproc N -- sets the number of processes on a node",
        )


def _check_ours(options: Options) -> None:
    check_placement(options.placement)
    if options.placement is not None and find_option_value(options.slurm_options, "switches", "segment") is not None:
        raise UsageError("slurm: --placement cannot be combined with --switches or --segment", "use one of them")
    if options.placement not in (None, "any") and find_num_nodes(options.slurm_options) is None:
        raise UsageError("slurm: --placement needs a fixed number of nodes", "such as -N 4")
    if options.command == "srun":
        given = [
            name
            for name, is_given in (
                ("--follow", options.follow),
                ("--requeue", options.requeue),
                ("--chain", options.chain != 1),
                ("--max-restarts", options.max_restarts is not None),
                ("--spare-nodes", options.spare_nodes > 0),
                ("--array", options.is_array),
            )
            if is_given
        ]
        if given:
            raise UsageError(f"slurm srun does not support {given[0]}", "use slurm sbatch")
    if options.is_array and (options.max_restarts is not None or options.spare_nodes):
        raise UsageError(
            "slurm: --array cannot be combined with --max-restarts or --spare-nodes",
            "remove them; to finish the work of failed array tasks, submit the same command again",
        )
    if options.chain != 1:
        _check_chain(options)
    if options.spare_nodes and find_num_nodes(options.slurm_options) is None:
        raise UsageError("slurm: --spare-nodes needs a fixed number of nodes", "such as -N 4")
    if options.requeue and find_option_value(options.slurm_options, "no-requeue") is not None:
        raise UsageError("slurm: --requeue and --no-requeue cannot be combined")


def _check_chain(options: Options) -> None:
    if options.chain < 1:
        raise UsageError(f"slurm: --chain {options.chain} is not a number of jobs", "use a number from 1")
    if options.is_array:
        raise UsageError("slurm: --chain continues a run, and the jobs of an --array have none", "remove one of them")
    if options.requeue:
        raise UsageError(
            "slurm: --requeue continues the same job over any number of time limits", "remove --chain or --requeue"
        )
    if find_option_value(options.slurm_options, "time") is None:
        raise UsageError("slurm: --chain needs the time limit of each job", "such as -t 24:00:00")
