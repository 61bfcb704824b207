"""YAML text to values that know where they were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import yaml
from msgspec import Struct

from primus.errors import UsageError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_OURS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")
"""What YAML 1.1 reads otherwise than people mean it: `1e-5` is text, `1:30` and `010` numbers, `2024-01-01` a date."""


class _Loader(_Base):  # type: ignore[misc]
    """PyYAML's safe loader with the numbers of YAML 1.2, so that `1e-5` is one."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - how PyYAML spells it
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NOT_OURS]
        for first, resolvers in _Base.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][\d_]*)$|0x[0-9a-fA-F]+$"), list("-+0123456789")
)


_DumperBase: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_DumperBase):  # type: ignore[misc]
    """Quotes what the loader would not read as text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def text(self, value: str) -> yaml.ScalarNode:
        """A string; the line breaks that YAML 1.1 alone knows are escaped, since loaders differ on them."""
        style = '"' if _RARE_BREAK.search(value) else None
        node: yaml.ScalarNode = self.represent_scalar("tag:yaml.org,2002:str", value, style=style)
        return node


_RARE_BREAK = re.compile("[\\x85\\u2028\\u2029\\ufeff]")
_Dumper.add_representer(str, _Dumper.text)


class Leaf(Struct, frozen=True):
    """A value as written: a scalar or a whole list."""

    value: Any
    origin: str
    """`default`, `preset:name.yaml`, `exp.yaml:12`, `--lr` or `$NAME`."""
    text: str = ""
    """A scalar's text as written."""
    typed: bool = False
    """Whether it was typed in a shell, where `12` may be meant as a string."""


Tree = dict[str, Union[Leaf, "Tree"]]


def read(
    path: Path, environ: Mapping[str, str] | None, shown: str | None = None, *, may_be_empty: bool = False
) -> Tree:
    """Read a YAML file whose top level is a mapping; `${VAR}` and `${VAR:default}` are replaced.

    Args:
        path: The file.
        environ: Values of the variables; None leaves `${` as it stands.
        shown: How origins name the file; its path relative to the working directory when None.
        may_be_empty: Whether a file without keys is an empty mapping.

    Raises:
        UsageError: The file is missing, empty, not YAML, repeats a key, or needs a variable that is not set.
    """
    shown = shown or display(path)
    text = _read_text(path, shown)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None and may_be_empty:
            return {}
        if node is None:
            raise UsageError(f"{shown} is empty", "it must hold a mapping of keys to values")
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(f"{shown}:{node.start_mark.line + 1}: expected keys and values, found a {node.id}")
        return _Reader(loader, shown, environ).mapping(node)
    except RecursionError:
        raise UsageError(f"{shown}: a value contains itself, or is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        raise UsageError(_syntax_problem(shown, text, error)) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{shown}: not YAML: {error}") from None
    finally:
        loader.dispose()


def scalar(text: str) -> Any:
    """`text` read as a YAML value: `1e-4` is a number, `null` is None; text that is not YAML stays text."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a safe loader
    except (yaml.YAMLError, RecursionError, ValueError):
        return text


def dump(value: Any) -> str:
    """`value` as YAML that `read` gives back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def display(path: Path) -> str:
    """`path` relative to the working directory where it is below it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _read_text(path: Path, shown: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{shown}: no such file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read: {error.strerror}") from None


def _syntax_problem(shown: str, text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark else 0
    written = text.splitlines()[line : line + 1]
    if written and "\t" in written[0][: len(written[0]) - len(written[0].lstrip())]:
        return f"{shown}:{line + 1}: a tab indents this line; YAML allows only spaces"
    return f"{shown}:{line + 1}: {error.problem or error.context}"


class _Reader:
    """Turns nodes of one file into a Tree."""

    def __init__(self, loader: Any, shown: str, environ: Mapping[str, str] | None) -> None:
        self.loader = loader
        self.shown = shown
        self.environ = environ

    def mapping(self, node: yaml.MappingNode) -> Tree:
        tree: Tree = {}
        own = [id(key_node) for key_node, _ in node.value]
        self.loader.flatten_mapping(node)
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(self.loader.construct_object(key_node, deep=True))
            if key in seen:
                raise UsageError(f"{self.where(key_node)}: key '{key}' is given twice")
            if id(key_node) in own:  # those that `<<` merges in may be given again
                seen.add(key)
            tree[key] = self.mapping(value_node) if isinstance(value_node, yaml.MappingNode) else self.leaf(value_node)
        return tree

    def leaf(self, node: yaml.Node) -> Leaf:
        if isinstance(node, yaml.SequenceNode):
            return Leaf([self.plain(item) for item in node.value], self.where(node))
        assert isinstance(node, yaml.ScalarNode), "mappings are trees"
        if "${" not in node.value or self.environ is None:
            return Leaf(self.loader.construct_object(node, deep=True), self.where(node), node.value)
        return self.substituted(node)

    def plain(self, node: yaml.Node) -> Any:
        """An item of a list, without origins inside."""
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return plain(self.mapping(node))
        return self.leaf(node).value

    def substituted(self, node: yaml.ScalarNode) -> Leaf:
        assert self.environ is not None
        text, used = substitute(node.value, self.environ, self.where(node))
        origin = ", ".join(f"${name}" for name in used) or self.where(node)
        if node.style in ("'", '"'):
            return Leaf(text, origin, text)
        return Leaf(scalar(text), origin, text, typed=True)

    def where(self, node: yaml.Node) -> str:
        return f"{self.shown}:{node.start_mark.line + 1}"


def plain(tree: Tree) -> dict[str, Any]:
    """`tree` without origins."""
    return {key: item.value if isinstance(item, Leaf) else plain(item) for key, item in tree.items()}


_VARIABLE = re.compile(r"\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(:|\}))?")


def substitute(text: str, environ: Mapping[str, str], where: str) -> tuple[str, list[str]]:
    """Replace `${VAR}` and `${VAR:default}` in `text`; a default may hold further variables.

    Values of variables are taken as they are, never expanded again.

    Returns:
        The text, and the names of the variables that were found in `environ`.

    Raises:
        UsageError: A variable without default is not set, `${` begins none, or a brace is not closed.
    """
    parts: list[str] = []
    used: list[str] = []
    position = 0
    while match := _VARIABLE.search(text, position):
        name, after = match.groups()
        if name is None:
            raise UsageError(f"{where}: '${{' begins no variable in {text!r}", "write ${NAME} or ${NAME:default}")
        parts.append(text[position : match.start()])
        end = match.end() if after == "}" else _closing_brace(text, match.end(), where)
        if name in environ:
            parts.append(environ[name])
            used.append(name)
        elif after == "}":
            raise UsageError(f"{where}: variable {name} is not set", f"export {name}=... or write ${{{name}:default}}")
        else:
            default, inner = substitute(text[match.end() : end - 1], environ, where)
            parts.append(default)
            used += inner
        position = end
    return "".join([*parts, text[position:]]), used


def _closing_brace(text: str, start: int, where: str) -> int:
    depth = 1
    for index in range(start, len(text)):
        depth += (text.startswith("${", index)) - (text[index] == "}")
        if depth == 0:
            return index + 1
    raise UsageError(f"{where}: '${{' without '}}' in {text!r}")
