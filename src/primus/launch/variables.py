"""Variables as users type them: NAME=VALUE, a NAME that is set, or a file of assignments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from primus.errors import UsageError
from primus.plan import Variable
from primus.redaction import is_harmless_variable, learn

TYPED_VARIABLE = "PRIMUS_TYPED_VARIABLES"
"""Variable with the names of variables that reach a node by name, but whose values the user typed for this run."""


def parse_variables(words: Iterable[str], flag: str, environ: Mapping[str, str]) -> dict[str, Variable]:
    """Variables of `--env`: assignments, names in `environ`, and files of assignments; of `--env-file`, files alone.

    Raises:
        UsageError: A word is none of these.
    """
    variables: dict[str, Variable] = {}
    for word in words:
        if not word or ("=" in word and flag == "--env"):
            name, _, value = word.partition("=")
            variables[check_name(name, "--env")] = Variable(value, "--env")
        elif word in variables:  # a value that a runtime around has set, as the image may have another one
            continue
        elif word in environ:
            is_typed = word in environ.get(TYPED_VARIABLE, "").split(",")
            variables[word] = Variable(environ[word], "--env", is_inherited=not is_typed)
        else:
            variables |= _read_variables(word, flag)
    learn({name: variable.value for name, variable in variables.items()})
    return variables


def name_typed_variables(env: Mapping[str, Variable]) -> dict[str, Variable]:
    """The variable that tells a node which of `env` were typed; empty if it makes no difference to the run folder."""
    names = [
        name
        for name, each in env.items()
        if not (each.is_inherited or each.holds_secret(name) or is_harmless_variable(name, each.value))
    ]
    return {TYPED_VARIABLE: Variable(",".join(sorted(names)), "redaction")} if names else {}


def check_name(name: str, where: str) -> str:
    """`name`, if shells and libraries can have a variable of it.

    Raises:
        UsageError: A value is invalid; the message begins with `where`.
    """
    if not is_name(name):
        raise UsageError(f"{where}: {name!r} is not a valid variable name")
    return name


def is_name(text: str) -> bool:
    """Whether shells take `text` for the name of a variable (POSIX, 3.230)."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) is not None


def _read_variables(file: str, flag: str) -> dict[str, Variable]:
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(
            f"{flag} {file}: {reason}", "pass NAME=VALUE, the NAME of a variable that is set, or a file of such lines"
        ) from None
    variables = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{file}:{number}: expected NAME=VALUE")
        where = f"{flag} {file}:{number}"
        variables[check_name(name, where)] = Variable(_unquote_value(value.strip()), where)
    return variables


def _unquote_value(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value
