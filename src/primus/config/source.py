"""Read YAML into values with their file and line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, Union

import msgspec
import yaml
from msgspec import Struct

from primus.config.text_file import format_path, read_config_text
from primus.errors import UsageError
from primus.redaction import is_secret_name, learn

_Value = TypeVar("_Value")
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_OURS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")
"""Scalars that YAML 1.1 reads unexpectedly: `1e-5` as text, `1:30` and `010` as numbers, `2024-01-01` as a date."""


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
_LARGEST_INTEGER = 2**63 - 1
"""Largest integer that JSON readers and tensors can store."""
_MOST_DIGITS = 20
"""Maximum length of an integer that is converted; Python rejects thousands of digits."""


def _construct_integer(loader: Any, node: yaml.ScalarNode) -> int | str:
    """An integer; one that exceeds 64 bits stays text, which keys for numbers reject."""
    text: str = loader.construct_scalar(node)
    digits = text.replace("_", "")
    if len(digits) > _MOST_DIGITS:
        return text
    value = int(digits, 0)
    return value if -_LARGEST_INTEGER - 1 <= value <= _LARGEST_INTEGER else text


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_integer)
_SCALAR_CONSTRUCTORS = {
    tag: _Loader.yaml_constructors[tag]
    for tag in (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "int", "null", "str"))
}
"""By tag. They need none of the bookkeeping of `construct_object` for collections, which takes most of its time."""

_TEXT_TAG = "tag:yaml.org,2002:str"

DEEPEST = 200
"""Maximum nesting depth; libyaml's composer overflows the stack at about ten thousand levels."""
MOST_REPEATED = 100_000
"""Maximum number of values that aliases (`*name`) may add to the written ones."""


_DumperBase: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _SourceDumper(_DumperBase):  # type: ignore[misc]
    """Quotes text that the loader would read as another type."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def represent_text(self, value: str) -> yaml.ScalarNode:
        """A string; the line breaks that YAML 1.1 alone knows are escaped, since loaders differ on them."""
        style = '"' if _RARE_BREAK.search(value) else None
        node: yaml.ScalarNode = self.represent_scalar("tag:yaml.org,2002:str", value, style=style)
        return node


_RARE_BREAK = re.compile("[\\x85\\u2028\\u2029\\ufeff]")
_SourceDumper.add_representer(str, _SourceDumper.represent_text)


class Leaf(Struct, frozen=True):
    """A value as written: a scalar or a whole list."""

    value: Any
    origin: str
    """`default`, `preset:name.yaml`, `exp.yaml:12`, `--lr` or `$NAME`."""
    text: str = ""
    """A scalar's text as written."""
    typed: bool = False
    """Whether it was typed in a shell or is a variable's, where `12` may be meant as a string and "12" as a number."""


Tree = dict[str, Union[Leaf, "Tree"]]
ConfigValue: TypeAlias = Union[bool, int, float, str, "list[ConfigValue]", "dict[str, ConfigValue]", None]
"""A value as JSON, TOML and YAML write it."""


def read_package_yaml(path: Path, kind: type[_Value]) -> _Value:
    """A YAML file of this package as `kind`; the tests keep it valid, so a mistake is not explained."""
    values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Base)  # noqa: S506 - the safe loader
    return msgspec.convert(values, kind)


def read_yaml(
    path: Path, environ: Mapping[str, str] | None, shown: str | None = None, *, may_be_empty: bool = False
) -> Tree:
    """Read a YAML file whose top level is a mapping; `${VAR}` and `${VAR:default}` are replaced.

    Args:
        path: The file.
        environ: Values of the variables; None leaves `${` unchanged.
        shown: Name of the file in origins; its path relative to the working directory if None.
        may_be_empty: Whether a file without keys is an empty mapping.

    Raises:
        UsageError: The file is missing, empty, not YAML, repeats a key, or needs a variable that is not set.
    """
    shown = shown or format_path(path)
    text = read_config_text(path, shown)
    if path.suffix.lower() == ".toml" or _is_toml(text):
        hint = f"`primus-cli direct -- config import {shown}` makes an experiment of it"
        raise UsageError(f"{shown}: this is TOML", hint)
    loader: Any = None
    try:
        node = _compose_document(text)
        loader = _Loader("")
        if node is None and may_be_empty:
            return {}
        if node is None:
            raise UsageError(f"{shown} is empty", "it must hold a mapping of keys to values")
        if not isinstance(node, yaml.MappingNode):
            hint = "config import reads scripts of other frameworks" if shown.endswith((".py", ".sh")) else ""
            raise UsageError(f"{shown}:{node.start_mark.line + 1}: expected keys and values, found a {node.id}", hint)
        return _TreeReader(loader, shown, environ).read_mapping(node)
    except yaml.MarkedYAMLError as error:
        raise UsageError(_describe_syntax_error(shown, text, error)) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{shown}: not YAML: {error}") from None
    except RecursionError:  # a long chain of aliases
        raise UsageError(f"{shown}: nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


def parse_scalar(text: str) -> Any:
    """`text` read as a YAML value: `1e-4` is a number, `null` is None; text that is not YAML stays text."""
    try:
        node = _compose_document(text)
        return None if node is None else _construct_value(_Loader(""), node)
    except (yaml.YAMLError, RecursionError):
        return text


def _compose_document(text: str) -> Any:
    """The one document of `text`, whose aliases do not expand without bound.

    Raises:
        YAMLError: It is not YAML, is nested too deeply, contains itself, or its aliases expand to too many values.
    """
    # Every collection is opened by one of these characters, so that most texts are parsed once.
    if sum(map(text.count, "[{-?:")) > DEEPEST:
        _check_depth(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    finally:
        loader.dispose()
    # Without an alias nothing repeats, and nothing is nested deeper than it is written.
    if node is not None and _may_hold_alias(text):
        extents: dict[int, _Extent] = {}
        whole = _measure_node(node, extents)
        # Bounds the expansion before it happens: nested aliases grow exponentially ("billion laughs").
        if whole.values - len(extents) > MOST_REPEATED:
            raise _build_error(node, f"aliases repeat more than {MOST_REPEATED:,} values")
        if whole.levels > DEEPEST:
            raise _build_error(node, f"more than {DEEPEST} levels of nesting")
    return node


def _may_hold_alias(text: str) -> bool:
    """Whether a line that is more than a comment has an asterisk; `splitlines` knows all line breaks of YAML."""
    return "*" in text and any("*" in line and not line.lstrip().startswith("#") for line in text.splitlines())


def _check_depth(text: str) -> None:
    """Reject deep nesting by the events of the parser, which does not recurse."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _build_error(event, f"more than {DEEPEST} levels of nesting")


class _Extent(Struct, frozen=True):
    """Size of a value after all aliases are expanded."""

    values: int
    levels: int


_UNDER_WAY = _Extent(0, 0)


def _measure_node(node: yaml.Node, extents: dict[int, _Extent]) -> _Extent:
    """The extent of `node`; `extents` remembers those of all nodes, so that each is visited once.

    Raises:
        MarkedYAMLError: It contains itself.
    """
    known = extents.get(id(node))
    if known is _UNDER_WAY:
        raise _build_error(node, "a value contains itself")
    if known is not None:
        return known
    # Marks the nodes of the current path, so that an alias to one of them is found.
    extents[id(node)] = _UNDER_WAY
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    inner = [_measure_node(part, extents) for part in parts]
    found = _Extent(1 + sum(each.values for each in inner), 1 + max((each.levels for each in inner), default=0))
    extents[id(node)] = found
    return found


def _construct_value(loader: Any, node: yaml.Node) -> Any:
    """The value of `node`, of the types that YAML and JSON share.

    Raises:
        MarkedYAMLError: A tag is unknown, or does not fit its value.
    """
    if node.tag == _TEXT_TAG and isinstance(node, yaml.ScalarNode):
        return node.value
    try:
        construct = _SCALAR_CONSTRUCTORS.get(node.tag) if isinstance(node, yaml.ScalarNode) else None
        value = construct(loader, node) if construct else loader.construct_object(node, deep=True)
    except (ValueError, KeyError, AttributeError, TypeError):  # what PyYAML's constructors raise
        raise _build_error(node, f"this is not a {node.tag.rpartition(':')[2]}") from None
    if isinstance(node, yaml.ScalarNode) and not isinstance(value, str | int | float | None):
        raise _build_error(node, f"a value of the type !!{node.tag.rpartition(':')[2]} is not supported")
    return value


def _build_error(place: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


_TOML_LINE = re.compile(r"\[\[?[\w.\-\"' ]+\]\]?\s*(#.*)?|[\w.\-]+\s*=\s*\S.*")


def _is_toml(text: str) -> bool:
    """Whether the first line that is not a comment is a [section] or an assignment of TOML."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return _TOML_LINE.fullmatch(first) is not None


def dump_yaml(value: Any) -> str:
    """`value` as YAML that `read` gives back unchanged."""
    return yaml.dump(value, Dumper=_SourceDumper, sort_keys=False, allow_unicode=True)


def format_yaml_value(value: Any) -> str:
    """A scalar as it is written in YAML, of either version: 1.1 reads `1e-05` as text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text or '""'


def _describe_syntax_error(shown: str, text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark else 0
    written = text.splitlines()[line : line + 1]
    if written and "\t" in written[0][: len(written[0]) - len(written[0].lstrip())]:
        return f"{shown}:{line + 1}: a tab indents this line; YAML allows only spaces"
    if error.problem == "but found another document":
        return f"{shown}:{line + 1}: a second YAML document begins here; a file holds one"
    return f"{shown}:{line + 1}: {error.problem or error.context}"


class _TreeReader:
    """Turns nodes of one file into a Tree."""

    def __init__(self, loader: Any, shown: str, environ: Mapping[str, str] | None) -> None:
        self.loader = loader
        self.shown = shown
        self.environ = environ
        self.own_keys: dict[int, set[int]] = {}
        """Keys that each mapping writes itself, before `<<` brings in others; an alias leads to a mapping again."""

    def read_mapping(self, node: yaml.MappingNode) -> Tree:
        tree: Tree = {}
        own = self.own_keys.setdefault(id(node), {id(key_node) for key_node, _ in node.value})
        self.loader.flatten_mapping(node)
        seen: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            key = str(_construct_value(self.loader, key_node))
            if key in seen:
                first = seen[key].start_mark.line + 1
                raise UsageError(
                    f"{self.format_place(key_node)}: key '{key}' is given twice, first in line {first}",
                    "remove one of the two; loaders that accept both, such as PyYAML's, take the last",
                )
            if id(key_node) in own:  # keys that `<<` merges in may be overridden
                seen[key] = key_node
            _learn_secrets(key, value_node)
            tree[key] = (
                self.read_mapping(value_node)
                if isinstance(value_node, yaml.MappingNode)
                else self.read_leaf(value_node)
            )
        return tree

    def read_leaf(self, node: yaml.Node) -> Leaf:
        if isinstance(node, yaml.SequenceNode):
            return Leaf([self.read_plain_value(item) for item in node.value], self.format_place(node))
        assert isinstance(node, yaml.ScalarNode), "mappings are trees"
        if "${" not in node.value or self.environ is None:
            return Leaf(_construct_value(self.loader, node), self.format_place(node), node.value)
        return self.substitute_variables(node)

    def read_plain_value(self, node: yaml.Node) -> Any:
        """An item of a list, without origins inside."""
        if isinstance(node, yaml.SequenceNode):
            return [self.read_plain_value(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return strip_origins(self.read_mapping(node))
        return self.read_leaf(node).value

    def substitute_variables(self, node: yaml.ScalarNode) -> Leaf:
        assert self.environ is not None
        text, used = substitute_variables(node.value, self.environ, self.format_place(node))
        origin = ", ".join(f"${name}" for name in used) or self.format_place(node)
        if node.style in ("'", '"'):
            return Leaf(text, origin, text, typed=True)
        return Leaf(parse_scalar(text), origin, text, typed=True)

    def format_place(self, node: yaml.Node) -> str:
        return f"{self.shown}:{node.start_mark.line + 1}"


_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "int", "null"))


def _learn_secrets(key: str, node: yaml.Node) -> None:
    """Register the secrets of a file with redaction: values of secret keys, and secrets inside any value."""
    if not isinstance(node, yaml.ScalarNode) or "${" in node.value:
        return
    # A number or a switch is secret by its key only, never by its form.
    if node.tag not in _PLAIN_TAGS or is_secret_name(key):
        learn({key: node.value})


def strip_origins(tree: Tree) -> dict[str, Any]:
    """`tree` without origins."""
    return {key: item.value if isinstance(item, Leaf) else strip_origins(item) for key, item in tree.items()}


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted path; groups may be nested, or written with dots."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


_SHELL_DEFAULT = "-"
"""After the colon, as shells write defaults: `${NAME:-default}`, which is taken also where the variable is empty."""
_VARIABLE = re.compile(r"\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(:|\}))?")


def substitute_variables(text: str, environ: Mapping[str, str], where: str) -> tuple[str, list[str]]:
    """Replace `${VAR}`, `${VAR:default}` and `${VAR:-default}` in `text`; a default may hold further variables.

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
            raise UsageError(
                f"{where}: '${{' is not followed by a variable name in {text!r}", "write ${NAME} or ${NAME:default}"
            )
        parts.append(text[position : match.start()])
        end = match.end() if after == "}" else _find_closing_brace(text, match.end(), where)
        is_shell = after == ":" and text.startswith(_SHELL_DEFAULT, match.end())
        if environ.get(name) or (name in environ and not is_shell):
            parts.append(environ[name])
            used.append(name)
        elif after == "}":
            raise UsageError(f"{where}: variable {name} is not set", f"export {name}=... or write ${{{name}:default}}")
        else:
            default, inner = substitute_variables(text[match.end() + is_shell : end - 1], environ, where)
            parts.append(default)
            used += inner
        position = end
    return "".join([*parts, text[position:]]), used


def _find_closing_brace(text: str, start: int, where: str) -> int:
    depth = 1
    for index in range(start, len(text)):
        depth += (text.startswith("${", index)) - (text[index] == "}")
        if depth == 0:
            return index + 1
    raise UsageError(f"{where}: '${{' without '}}' in {text!r}")
