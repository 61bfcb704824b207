"""A command line as a value: global options, the chain of runtimes, the task."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from primus import registry
from primus.errors import PrimusError, UsageError, did_you_mean, find_nearest
from primus.runtime import RUNTIMES, LaunchRequest, RequestSegment

LEVELS = ("cluster", "container", "node")
"""Levels of runtimes, outermost first. A chain has at most one runtime of each, in this order."""

GLOBAL_WORDS = ("--dry-run", "--dry_run", "--debug", "--json")
"""Global options, which are accepted at any position."""

HELP_WORDS = ("-h", "--help")

SHORT = {"k8s": "kubernetes"}
"""Short names of runtimes."""

INSTALLATION_TASKS = ("engines", "setup", "upgrade-notes")
"""Tasks that concern the installation of primus on this machine: they need no runtime, and no word about it."""

WITHDRAWN = {
    "tune threads": "search variables: tune train --keys env.OMP_NUM_THREADS=1,2,4 env.OMP_PROC_BIND=false,close",
    "tune inductor": "keep compiled kernels by torch.compiler.save_cache_artifacts, or in TORCHINDUCTOR_CACHE_DIR",
}
"""Tasks that there were, and what does their work."""

CONTAINER = "container"
"""Runtime of the words that a cluster runtime leaves to a container, such as `slurm srun --container-image=IMAGE`."""

NODE_END = "direct"
"""Last runtime of every chain; added if it was not typed."""


class GlobalOptions(Struct, frozen=True, kw_only=True):
    """Options before the runtime."""

    dry_run: bool = False
    """Print the plan of every level and do nothing."""
    debug: bool = False
    """Show the traceback of an error."""
    json: bool = False
    """Print results as JSON."""
    no_config: bool = False
    """Ignore launcher files."""


class Command(Struct, frozen=True):
    """A parsed command line."""

    options: GlobalOptions
    request: LaunchRequest
    """Has no task if the runtime has its own commands, such as `kubernetes list`."""
    is_help: bool = False
    notes: tuple[str, ...] = ()
    """What was not typed: a runtime, or the options that come from a launcher file."""


def parse_command(argv: Sequence[str]) -> Command:
    """Split `argv` into global options, runtimes and task.

    Raises:
        UsageError: A runtime or task is unknown, or out of order; the message names the nearest.
    """
    segments = _split_segments(argv)
    words, given = _take_globals(segments[0])
    is_help = False
    runtimes: list[RequestSegment] = []
    rest = [words, *segments[1:]]
    notes: tuple[str, ...] = ()
    if words and not is_runtime(words[0]) and _is_task(words):
        rest.insert(0, [NODE_END])
        typed = f"no runtime is given: this runs on this machine, as 'primus-cli {NODE_END} -- {words[0]} ...' does"
        notes = () if words[0] in INSTALLATION_TASKS else (typed,)
    while rest and rest[0] and is_runtime(rest[0][0]):
        head, *own = rest.pop(0)
        own, more = _take_globals(own)
        given |= more
        is_help |= _asks_help(own)
        name = _normalize_word(head)
        split = registry.load_plug_in(RUNTIMES, name).split_container_words
        outside, inside = split(_drop_help(own)) if split else (_drop_help(own), ())
        runtimes += [RequestSegment(name, outside)] + ([RequestSegment(CONTAINER, inside)] if inside else [])
    if not runtimes:
        raise _make_runtime_error(words, [] if words or len(rest) < 2 else rest[1])
    if not rest and not is_help:
        runtimes[-1], rest = _complete_segment(runtimes[-1])
    if not rest and not is_help and _is_command(runtimes[-1]):
        if len(runtimes) > 1:
            raise UsageError(f"'{runtimes[-1].name}' without a task cannot run inside '{runtimes[0].name}'")
        _check_order(runtimes)
        return Command(GlobalOptions(**given), LaunchRequest(runtimes=tuple(runtimes), task=""))
    if rest:
        rest[0], more = _take_globals(rest[0])
        given |= more
    task, own = _find_task(rest, runtimes, is_help)
    own, passed_through = _split_passed_through(own)
    is_help |= _asks_help(own)
    request = LaunchRequest(runtimes=tuple(runtimes), task=task, words=(*_drop_help(own), *passed_through))
    _check_order(runtimes)
    return Command(GlobalOptions(**given), request, is_help, notes)


def is_runtime(word: str) -> bool:
    """Whether `word` is the name of a runtime."""
    return _normalize_word(word) in registry.list_plug_ins("runtimes")


def parse_segment_options(segment: RequestSegment) -> Struct:
    """The options of a runtime.

    Raises:
        UsageError: One is unknown or has a wrong value.
    """
    runtime: Any = registry.load_plug_in(RUNTIMES, segment.name)  # a module, which mypy does not know to be hashable
    return _parse_words(runtime, segment.name, segment.words)


@lru_cache(maxsize=16)
def _parse_words(runtime: Any, name: str, words: tuple[str, ...]) -> Struct:
    """Cached, because a command parses these options several times, and building a parser takes 3 ms."""
    if runtime.parse:
        parsed: Struct = runtime.parse(words)
        return parsed
    from primus.config import flags  # loads argparse, which help of the whole command does not need

    options: type[Struct] = runtime.Options
    return flags.parse_options(options, words, f"runtime '{name}'")[0]


def _complete_segment(segment: RequestSegment) -> tuple[RequestSegment, list[list[str]]]:
    """The segment without the words that name a task (`kubernetes create --exp FILE`), and that task."""
    module = registry.load_plug_in(RUNTIMES, segment.name)
    words, task = module.split_words(segment.words)
    return RequestSegment(segment.name, words), [list(task)] if task else []


def _is_command(segment: RequestSegment) -> bool:
    """Whether the runtime runs without a task, because of a command or an option."""
    commands = registry.load_plug_in(RUNTIMES, segment.name).COMMANDS
    return any(word in commands for word in segment.words[:1]) or any(
        word in commands for word in segment.words if word.startswith("--")
    )


def _split_segments(argv: Sequence[str]) -> list[list[str]]:
    segments: list[list[str]] = [[]]
    for word in argv:
        if word == "--":
            segments.append([])
        else:
            segments[-1].append(word)
    return segments


def _split_passed_through(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words of a task at a further `--`, which starts the command line of another program."""
    num_own = words.index("--") if "--" in words else len(words)
    return words[:num_own], words[num_own:]


def _take_globals(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """`words` without the global options, and the global options by field."""
    given = {word.removeprefix("--").replace("-", "_"): True for word in words if word in GLOBAL_WORDS}
    return [word for word in words if word not in GLOBAL_WORDS], given


def _asks_help(words: Sequence[str]) -> bool:
    return any(word in HELP_WORDS for word in words)


def _drop_help(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word not in HELP_WORDS)


def _normalize_word(word: str) -> str:
    return SHORT.get(word, word.lower().replace("_", "-"))


OTHER_PROGRAMS = {
    **{name: f"slurm {name}" for name in ("sbatch", "srun")},
    **dict.fromkeys(("docker", "podman", "apptainer", "singularity"), "container --image IMAGE"),
    "kubectl": "kubernetes create",
    **dict.fromkeys(("torchrun", "python", "python3", "accelerate", "deepspeed", "mpirun"), "direct"),
}
"""The runtime that does the work of a program whose name is typed in its place."""


def _make_runtime_error(words: Sequence[str], behind_dashes: Sequence[str]) -> UsageError:
    runtimes = registry.list_plug_ins("runtimes")
    if behind_dashes and is_runtime(behind_dashes[0]):
        name = behind_dashes[0]
        return UsageError(f"'--' before the runtime '{name}'", f"remove it: primus-cli {name} ... -- <task>")
    if not words:
        return UsageError("no runtime is given", f"primus-cli <{'|'.join(runtimes)}> -- <task>; see primus-cli --help")
    head = words[0]
    if head.startswith("-"):
        misplaced = _make_misplaced_option_error(words, [word for word in words if is_runtime(word)])
        if misplaced:
            return misplaced
        return UsageError(
            f"unknown option {head}",
            did_you_mean(head, ["--dry-run", "--debug", "--json", "--config", "--no-config", "--version", "--help"]),
        )
    hint = f"use primus-cli {OTHER_PROGRAMS[head]} ... -- <task>" if head in OTHER_PROGRAMS else ""
    return UsageError(f"no runtime '{head}'", hint or did_you_mean(head, runtimes))


def _find_task(rest: list[list[str]], runtimes: list[RequestSegment], is_help: bool) -> tuple[str, list[str]]:
    """The task's name and its words; words after a further `--` stay as they are."""
    words = rest[0] if rest else []
    for extra in rest[1:]:
        words = [*words, "--", *extra]
    tasks = registry.list_plug_ins("tasks")
    name = _find_task_name(words, tasks)
    if name:
        return name, words[len(name.split()) :]
    group = [task for task in tasks if words and task.split()[0] == words[0]]
    if (is_help or _asks_help(words)) and (not words or words[0].startswith("-") or group):
        return (words[0] if group else ""), ["--help"]
    if group:
        raise _make_subtask_error(words, group)
    raise _make_task_error(words, runtimes, tasks)


def _is_task(words: Sequence[str]) -> bool:
    """Whether `words` begin with a task, or with the first word of a group of tasks."""
    tasks = registry.list_plug_ins("tasks")
    return _find_task_name(words, tasks) is not None or words[0] in {name.split()[0] for name in tasks}


def _find_task_name(words: Sequence[str], tasks: Sequence[str]) -> str | None:
    """The longest task name that `words` begin with."""
    for length in (2, 1):
        name = " ".join(words[:length]).lower().replace("_", "-")
        if len(words) >= length and name in tasks:
            return name
    return None


def _make_subtask_error(words: Sequence[str], group: Sequence[str]) -> UsageError:
    subtasks = [task.split()[1] for task in group]
    if words[1:2] == ["--"]:
        return UsageError(
            "unexpected word '--'", f"it separates runtimes and task: -- {' '.join([words[0], *words[2:]])}"
        )
    if len(words) < 2 or words[1].startswith("-"):
        return UsageError(f"'{words[0]}' needs one of: {', '.join(subtasks)}")
    name = f"{words[0]} {words[1]}"
    return UsageError(f"no task '{name}'", WITHDRAWN.get(name) or did_you_mean(words[1], subtasks))


def _make_misplaced_option_error(words: Sequence[str], runtimes: Sequence[str]) -> UsageError | None:
    """The error for an option that begins `words` and belongs to a runtime; `runtimes` are those of the command."""
    from primus.launch.option_owner import find_option_owner  # loads argparse

    option = words[0].partition("=")[0]
    owner = find_option_owner(option, reversed(runtimes))
    if owner is None:
        return None
    runtime, spelling = owner
    return UsageError(
        f"{option} is an option of the runtime '{runtime}'",
        f"put it after the runtime, and before the --: primus-cli {runtime} {spelling} ... -- <task>",
    )


COUNTERPARTS = {"projection": "config check and --dry-run check an experiment without running it"}
"""Tasks of AMD-AGI/Primus that are not available, with what comes nearest."""


def _make_task_error(words: Sequence[str], runtimes: list[RequestSegment], tasks: Sequence[str]) -> UsageError:
    if words and words[0] in COUNTERPARTS:
        return UsageError(f"the task '{words[0]}' is not available yet", COUNTERPARTS[words[0]])
    stray = [word for segment in runtimes for word in segment.words if word in {t.split()[0] for t in tasks}]
    if not words and stray:
        return UsageError(
            f"'{stray[0]}' is a task: put ' -- ' before it", f"primus-cli {runtimes[-1].name} -- {stray[0]} ..."
        )
    if not words:
        for segment in runtimes:  # an unknown option is the more useful error
            parse_segment_options(segment)
        name = runtimes[-1].name
        commands = "|".join(registry.load_plug_in(RUNTIMES, name).COMMANDS)
        own = f", or primus-cli {name} {commands}" if commands else ""
        return UsageError("no task is given", f"primus-cli {name} -- <task>{own}; see primus-cli {name} --help")
    if words[0] == "--":
        return UsageError("unexpected word '--'", "'--' stands once before the task")
    if words[0].startswith("-"):
        misplaced = _make_misplaced_option_error(words, [segment.name for segment in runtimes])
        if misplaced:
            return misplaced
    if words[0].endswith((".py", ".sh")):
        hint = (
            "train pretrain --config FILE trains an experiment; config import reads scripts of Megatron-LM and others"
        )
        return UsageError(f"'{words[0]}' is a script, not a task", hint)
    heads = {task.split()[0] for task in tasks}
    in_groups = [f"'{task}'" for task in tasks if task.split()[1:] == [words[0]]]
    if in_groups and not find_nearest(words[0], heads):
        return UsageError(f"no task '{words[0]}'", f"did you mean {' or '.join(in_groups)}?")
    names = [*heads, *registry.list_plug_ins("runtimes")]
    kind = "runtime or task" if find_nearest(words[0], registry.list_plug_ins("runtimes")) else "task"
    return UsageError(f"no {kind} '{words[0]}'", did_you_mean(words[0], names if kind != "task" else heads))


def _check_order(runtimes: Sequence[RequestSegment]) -> None:
    """Cluster, then container, then node; each level at most once."""
    levels = [(registry.load_plug_in(RUNTIMES, segment.name).LEVEL, segment.name) for segment in runtimes]
    for level, name in levels:
        if level not in LEVELS:
            raise PrimusError(f"runtime '{name}': invalid LEVEL '{level}'", f"use one of {', '.join(LEVELS)}")
    for (outer, first), (inner, second) in itertools.pairwise(levels):
        if LEVELS.index(outer) >= LEVELS.index(inner):
            is_twice = first == second == CONTAINER  # such as slurm --container-image=A -- container --image B
            raise UsageError(
                f"runtime '{second}' ({inner}) cannot run inside '{first}' ({outer})",
                "a container is given twice: write its options behind 'container' only"
                if is_twice
                else "the order is cluster, container, node: slurm -- container -- direct",
            )
