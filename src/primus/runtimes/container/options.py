"""What is typed after `container`: options of its own, and the engine's, which are passed on as they are."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from primus.config.flags import Flag, convert_flag_value, list_flags
from primus.errors import UsageError
from primus.redaction import redact_args

WHAT = "runtime 'container'"


class Options(Struct, frozen=True, kw_only=True):
    """Run in a container; any other option is the engine's, and passed on as typed."""

    engine: str | None = None
    """docker, podman, apptainer or singularity; $PRIMUS_CONTAINER_ENGINE, else the first of them on PATH."""
    image: str | None = None
    """Image, or .sif file; $DOCKER_IMAGE, else AMD's rocm/primus where the GPUs are AMD's."""
    mount: Annotated[tuple[str, ...], Meta(extra={"short": ("-v",), "aliases": ("--volume",)})] = ()
    """SRC[:DST[:ro]], or type=bind,... as the engine has it; may be repeated. The checkout, the working directory and
    the workspace are mounted anyway."""
    env: Annotated[tuple[str, ...], Meta(extra={"short": ("-e",)})] = ()
    """NAME=VALUE, a NAME that this environment has, or a file of such lines, for the task; may be repeated."""
    name: str | None = None
    """Name of the container; primus-<run>-<attempt>-<node rank>."""
    shell: bool = False
    """Open a shell in the container instead of the task, which may be left out."""
    devices: bool = True
    """Pass GPUs and InfiniBand adapters on."""
    user: bool = False
    """Be the user of this shell inside, not the image's; with a value (--user 1000:1000) it is the engine's option."""
    grace: Annotated[float, Meta(ge=0)] = 600.0
    """Seconds that the task has after it was asked to stop, before its container is killed."""
    clean: bool = False
    """First remove what ended containers of yours are left here; a task may be left out."""


class ContainerArguments(Options, frozen=True, kw_only=True):
    """Options with what was left to the engine."""

    passed: tuple[str, ...] = ()
    """Words for the engine, as typed."""


ALIASES = {
    "-w": "--workdir",
    "-u": "--user",
    "--net": "--network",
    "-m": "--memory",
    "-l": "--label",
    "--pwd": "--workdir",
}
"""Spellings of the engines' options under which primus sets the same."""
DETACHING = ("-d", "--detach")


def parse(words: Sequence[str]) -> ContainerArguments:
    """The options in `words`.

    Raises:
        UsageError: A value is missing or impossible, or a secret stands among the engine's options.
    """
    flags = {name: flag for flag in list_flags(Options) for name in flag.names}
    given: dict[str, Any] = {}
    passed: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = flags.get(name.replace("_", "-"))
        if word.replace("_", "-") == "--no-devices":
            given["devices"] = False
        elif flag is None or _is_engines_user(flag, equals, rest):
            passed.append(_check_engine_option(word, passed))
        elif flag.is_switch and not equals:
            given[flag.field] = True
        else:
            _take_option(flag, value if equals else _take_value(rest, name), given, passed)
    if given.get("image", "").startswith("-"):
        raise UsageError(f"{WHAT}: --image {given['image']} is an option, not an image")
    fields = {flag.field: flag for flag in flags.values()}
    options = {name: convert_flag_value(fields[name], value, WHAT) for name, value in given.items()}
    return ContainerArguments(**options, passed=tuple(passed))


def group_engine_options(passed: Sequence[str]) -> dict[str, list[str]]:
    """Values of the engine's options by their long spelling; an option without a value has an empty one."""
    found: dict[str, list[str]] = {}
    for word, following in itertools.zip_longest(passed, passed[1:], fillvalue=""):
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        text = value if equals else "" if following.startswith("-") else following
        found.setdefault(ALIASES.get(name, name), []).append(text)
    return found


def find_misspelled_option(passed: Sequence[str]) -> str:
    """Which of our options may be meant by one that the engine may not have; empty where none looks like it."""
    ours = [name for flag in list_flags(Options) if flag.default is not True for name in flag.names]
    for word in group_engine_options(passed):
        if len(word) < len("--env") or word.startswith("--no-"):
            continue
        near = difflib.get_close_matches(word, ours, n=1, cutoff=0.8)  # --uts is not --user
        if near and not word.startswith(near[0]):  # nor are --userns and --env-file ours
            return f"{word} went to it: did you mean '{near[0]}'?"
    return ""


def _take_option(flag: Flag, value: str, given: dict[str, Any], passed: list[str]) -> None:
    if flag.field == "mount" and _is_engines_mount(value):
        passed += ["--mount" if value.startswith("type=") else "--volume", value]
    elif flag.is_list:
        given.setdefault(flag.field, []).append(value)
    elif flag.field in given and given[flag.field] != value:
        raise UsageError(f"{WHAT}: {flag.names[0]} is given twice: {given[flag.field]} and {value}")
    else:
        given[flag.field] = value


def _is_engines_mount(word: str) -> bool:
    """Whether a mount is no folder of ours: the engine's own syntax, or a volume that it keeps under a name."""
    name, colon, _ = word.partition(":")
    return word.startswith("type=") or bool(name and colon and not set(name) & set("/.~"))


def _is_engines_user(flag: Flag, equals: str, rest: list[str]) -> bool:
    """Whether `--user` has a value, as the engines' option of that name."""
    return flag.field == "user" and bool(equals or (rest and not rest[0].startswith("-")))


def _take_value(rest: list[str], name: str) -> str:
    if not rest:
        raise UsageError(f"{WHAT}: {name} needs a value")
    return rest.pop(0)


def _check_engine_option(word: str, before: Sequence[str]) -> str:
    if not word.startswith("-") and not (before and before[-1].startswith("-") and "=" not in before[-1]):
        raise UsageError(f"{WHAT}: unexpected word '{word}'", "the image is given by --image; a task follows ' -- '")
    if word.partition("=")[0] in DETACHING:
        raise UsageError(
            f"{word}: primus waits for its container", "leave it out; put the whole command in the background"
        )
    safe = redact_args([*before, word])[-1]
    if safe != word:
        raise UsageError(
            f"a secret must not stand in the command line of another program: {safe}",
            "set it as a variable of your shell, and pass it on by its name: --env NAME",
        )
    return word
