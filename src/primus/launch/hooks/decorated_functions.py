"""Read the declarations of the decorated functions of a Python hook from its source, without running it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from msgspec import Struct, structs

from primus.errors import UsageError, did_you_mean
from primus.hook import STAGES
from primus.launch.hooks.time_limit import parse_seconds
from primus.plan import Action


class HookFunction(Struct, frozen=True):
    """A decorated function."""

    name: str
    action: Action
    """The file's declaration, as changed by the decorator."""


def find_functions(path: Path, text: str, plain: Action) -> list[HookFunction]:
    """The decorated functions of a Python file; none if it has a syntax error, which is reported when it runs.

    Args:
        path: The file, for messages.
        text: Its content.
        plain: The action of the file as a script, which the decorators change.

    Raises:
        UsageError: A decorator is misplaced, or has an unknown or invalid argument.
    """
    try:
        tree = ast.parse(text, str(path))
    except (SyntaxError, ValueError):
        return []
    decorators = _find_decorator_names(tree)
    found = []
    for node in ast.walk(tree) if decorators else ():
        for decorator in getattr(node, "decorator_list", ()):
            call = decorator if isinstance(decorator, ast.Call) else None
            if ast.unparse(call.func if call else decorator) not in decorators:
                continue
            where = f"{path}:{decorator.lineno}"
            if not isinstance(node, ast.FunctionDef) or node not in tree.body:
                raise UsageError(f"{where}: @hook supports only plain functions at the top level of a file")
            found.append(HookFunction(node.name, _read_decorator(plain, call, where)))
    return found


def is_library(text: str) -> bool:
    """Whether a Python file only defines functions or classes that other hooks import; running it has no effect."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, _DEFINITIONS) for node in tree.body) and all(map(_only_defines, tree.body))


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PURE_CALLS = re.compile(
    r"(pathlib\.)?Path|(logging\.)?getLogger|re\.compile|os\.(getenv|environ\.get)|os\.path\.\w+|(typing\.)?TypeVar"
    r"|(collections\.)?namedtuple|frozenset|set|dict|list|tuple|str|int|float|bool"
    r"|.*\.(resolve|absolute|expanduser|joinpath|with_name)",
    re.DOTALL,
)
"""Calls without side effects; any other call at module level may be the work of a script."""


def _only_defines(node: ast.stmt) -> bool:
    if isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom, ast.Pass)):
        return True
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
        return all(_PURE_CALLS.fullmatch(ast.unparse(call.func)) for call in calls)
    if isinstance(node, ast.If):
        return all(map(_only_defines, [*node.body, *node.orelse]))
    if isinstance(node, ast.Try):
        handled = [each for handler in node.handlers for each in handler.body]
        return all(map(_only_defines, [*node.body, *handled, *node.orelse, *node.finalbody]))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _find_decorator_names(tree: ast.Module) -> set[str]:
    """Names by which a file may call the decorator."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "primus.hook":
            names |= {alias.asname or "hook" for alias in node.names if alias.name in ("hook", "*")}
        if isinstance(node, ast.ImportFrom) and node.module == "primus":
            names |= {f"{alias.asname or alias.name}.hook" for alias in node.names if alias.name == "hook"}
        if isinstance(node, ast.Import):
            names |= {f"{alias.asname or alias.name}.hook" for alias in node.names if alias.name == "primus.hook"}
    return names


_ARGUMENTS = {"stage": "stage", "once": "once", "lock": "locked", "timeout_s": "timeout_s"}
"""Field of an Action that each argument of the decorator sets."""


def _read_decorator(plain: Action, call: ast.Call | None, where: str) -> Action:
    changes = {}
    for keyword in call.keywords if call else ():
        if keyword.arg not in _ARGUMENTS:
            raise UsageError(
                f"{where}: @hook has no argument '{keyword.arg}'", did_you_mean(str(keyword.arg), _ARGUMENTS)
            )
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError:
            raise UsageError(
                f"{where}: @hook({keyword.arg}=...) must be a literal: the file is parsed, not executed"
            ) from None
        if keyword.arg == "stage" and value not in (None, *STAGES):
            raise UsageError(f"{where}: unknown stage {value!r}", did_you_mean(str(value), STAGES))
        if keyword.arg == "timeout_s" and value is not None:
            value = parse_seconds(str(value), where)
        if value is not None:
            changes[_ARGUMENTS[keyword.arg]] = value
    return structs.replace(plain, **changes)
