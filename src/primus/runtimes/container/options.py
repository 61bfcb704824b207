"""Parse the arguments of `container`: options of primus, and options of the engine, which are passed through."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from primus.config.flags import Flag, convert_flag_value, list_flags
from primus.errors import UsageError
from primus.redaction import redact_args

WHAT = "runtime 'container'"


class Options(Struct, frozen=True, kw_only=True):
    """Run in a container; other options are passed through to the engine."""

    engine: str | None = None
    """docker, podman, apptainer or singularity (default: $PRIMUS_CONTAINER_ENGINE, else the first of them on PATH); or
    pyxis, inside of slurm."""
    image: str | None = None
    """Image, or .sif or .sqsh file (default: $DOCKER_IMAGE, else rocm/primus on a node with AMD GPUs)."""
    mount: Annotated[tuple[str, ...], Meta(extra={"short": ("-v",), "aliases": ("--volume",)})] = ()
    """SRC[:DST[:ro]], or type=bind,... in the engine's syntax; may be repeated. The checkout, the working directory and
    the workspace are always mounted."""
    env: Annotated[tuple[str, ...], Meta(extra={"short": ("-e",)})] = ()
    """Environment variable of the task: NAME=VALUE, NAME of a variable that is set, or a file; may be repeated."""
    name: str | None = None
    """Name of the container (default: primus-<run>-<attempt>-<node rank>)."""
    shell: bool = False
    """Open a shell in the container instead of running the task, which is optional."""
    devices: bool = True
    """Make GPUs and InfiniBand adapters available in the container."""
    user: bool = False
    """Run as your own UID:GID instead of the image's user; with a value (--user 1000:1000), the engine's option."""
    grace: Annotated[float, Meta(ge=0)] = 600.0
    """Seconds between the signal that stops the task and killing its container."""
    clean: bool = False
    """First remove your ended containers on this host that primus has started; the task is optional."""


class ContainerArguments(Options, frozen=True, kw_only=True):
    """Options of primus, and the options that are passed through."""

    passed: tuple[str, ...] = ()
    """Arguments for the engine, as typed."""


ALIASES = {
    "-w": "--workdir",
    "-u": "--user",
    "--net": "--network",
    "-m": "--memory",
    "-l": "--label",
    "--pwd": "--workdir",
}
"""Spellings of engine options that primus sets under another spelling."""
DETACHING = ("-d", "--detach")


def parse(words: Sequence[str]) -> ContainerArguments:
    """The options in `words`.

    Raises:
        UsageError: A value is missing or invalid, or an engine option contains a secret.
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
    """Values of the engine's options by their long spelling; empty for an option without a value."""
    found: dict[str, list[str]] = {}
    for word, following in itertools.zip_longest(passed, passed[1:], fillvalue=""):
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        text = value if equals else "" if following.startswith("-") else following
        found.setdefault(ALIASES.get(name, name), []).append(text)
    return found


def find_misspelled_option(passed: Sequence[str]) -> str:
    """A hint if an option that was passed to the engine resembles one of primus; empty otherwise."""
    ours = [name for flag in list_flags(Options) if flag.default is not True for name in flag.names]
    for word in group_engine_options(passed):
        if len(word) < len("--env") or word.startswith("--no-"):
            continue
        import difflib  # only for this message

        near = difflib.get_close_matches(word, ours, n=1, cutoff=0.8)  # --uts is not --user
        if near and not word.startswith(near[0]):  # --userns and --env-file are the engine's as well
            return f"{word} was passed to the engine: did you mean '{near[0]}'?"
    return ""


def _take_option(flag: Flag, value: str, given: dict[str, Any], passed: list[str]) -> None:
    if flag.field == "mount" and _is_engines_mount(value):
        _check_volume_name(value)
        passed += ["--mount" if value.startswith("type=") else "--volume", value]
    elif flag.is_list:
        given.setdefault(flag.field, []).append(value)
    elif flag.field in given and given[flag.field] != value:
        raise UsageError(f"{WHAT}: {flag.names[0]} is given twice: {given[flag.field]} and {value}")
    else:
        given[flag.field] = value


def _is_engines_mount(word: str) -> bool:
    """Whether a mount is for the engine to read: its own syntax, or the name of one of its volumes."""
    name, colon, _ = word.partition(":")
    return word.startswith("type=") or bool(name and colon and not set(name) & set("/.~"))


def _check_volume_name(word: str) -> None:
    """Refuse the name of a volume that is also a folder here: the container would see an empty volume instead of it."""
    name, _, target = word.partition(":")
    if os.path.isdir(name):
        raise UsageError(
            f"--mount {word}: '{name}' is a volume of the engine, and also a folder here",
            f"write ./{word} for the folder, or --mount type=volume,source={name},target={target} for the volume",
        )


def _is_engines_user(flag: Flag, equals: str, rest: list[str]) -> bool:
    """Whether `--user` has a value, as the engine's option of that name has."""
    return flag.field == "user" and bool(equals or (rest and not rest[0].startswith("-")))


def _take_value(rest: list[str], name: str) -> str:
    if not rest:
        raise UsageError(f"{WHAT}: {name} needs a value")
    return rest.pop(0)


def _check_engine_option(word: str, before: Sequence[str]) -> str:
    if not word.startswith("-") and not (before and before[-1].startswith("-") and "=" not in before[-1]):
        raise UsageError(
            f"{WHAT}: unexpected argument '{word}'", "name the image with --image; write the task after ' -- '"
        )
    if word.partition("=")[0] in DETACHING:
        raise UsageError(
            f"{word} is not supported: primus waits for its container", "run primus-cli itself in the background"
        )
    safe = redact_args([*before, word])[-1]
    if safe != word:
        raise UsageError(
            f"a secret must not be in the command line of another program: {safe}",
            "set it as a variable of your shell, and pass its name: --env NAME",
        )
    return word
