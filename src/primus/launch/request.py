"""The typed command as a value; a replay starts from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from primus.redaction import redact_args, redact_value

ENV_FLAGS = ("--env", "-e")
"""Options of runtimes whose values are NAME=VALUE."""


class RequestSegment(Struct, frozen=True):
    """A runtime or a task with its words."""

    name: str
    words: tuple[str, ...] = ()


class LaunchRequest(Struct, frozen=True, kw_only=True):
    """The request.json of a run."""

    runtimes: tuple[RequestSegment, ...]
    """Outermost first."""
    task: str
    """Name of the task: ``train pretrain``."""
    words: tuple[str, ...] = ()
    """Words after the task's name."""


def redact_request(request: LaunchRequest) -> LaunchRequest:
    """`request` without secrets, as a run folder stores it."""
    runtimes = tuple(RequestSegment(segment.name, tuple(redact_args(segment.words))) for segment in request.runtimes)
    return LaunchRequest(runtimes=runtimes, task=request.task, words=tuple(redact_args(request.words)))


VARIABLES = {"--hf_token": "HF_TOKEN", "--hf-token": "HF_TOKEN"}
"""Options that give the value of a secret variable."""


def pass_secrets_by_name(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Replace each secret `--env NAME=VALUE` in `words` by `--env NAME`; also gives the values by name.

    An option of VARIABLES becomes `--env NAME`.

    The words are then safe in the command line of another program, which gets the values in its environment.
    """
    found: dict[str, str] = {}
    kept: list[str] = []
    after_env = False
    rest = iter(words)
    for word in rest:
        flag, equals, assignment = word.partition("=")
        if flag in VARIABLES:
            found[VARIABLES[flag]] = assignment if equals else next(rest, "")
            kept.append(f"--env={VARIABLES[flag]}")
            continue
        text = assignment if flag in ENV_FLAGS and equals else word if after_env else ""
        name, has_value, value = text.partition("=")
        if has_value and redact_value(name, value) != value:
            found[name] = value
            kept.append(word[: len(word) - len(value) - 1])
        else:
            kept.append(word)
        after_env = word in ENV_FLAGS or (after_env and not word.startswith("-"))
    return tuple(kept), found


def list_named_variables(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Names in `environ` that `words` of a runtime pass on by `--env NAME`."""
    found: list[str] = []
    after_env = False
    for word in words:
        flag, equals, value = word.partition("=")
        text = value if flag in ENV_FLAGS and equals else word if after_env else ""
        if text in environ:
            found.append(text)
        after_env = word in ENV_FLAGS or (after_env and not word.startswith("-"))
    return found
