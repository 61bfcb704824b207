"""The fields of an options Struct as command-line flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, structs

from primus.config.docs import read_field_docs
from primus.errors import UsageError, did_you_mean

Options = TypeVar("Options", bound=Struct)
Positional = Annotated[str, Meta(extra={"positional": True})]
"""Type of a field that is a positional argument instead of a flag."""
PositionalList = Annotated[list[str], Meta(extra={"positional": True})]
"""The same for all further words."""
RunName = Annotated[str, Meta(extra={"names": "run"})]
"""Type of a field that names a run, as `store.find_run` takes it: shells complete it."""
PositionalRun = Annotated[str, Meta(extra={"positional": True, "names": "run"})]
"""The same as a positional argument."""


WORD_OPTIONS = ("hosts", "input")
"""Options whose value is typed without their name: `ssh HOST` and the file that a task reads."""


FILES = ("config",)
"""Options that name a file and are given once: the last of several would hide the others."""


class Flag(Struct, frozen=True):
    """One field as a command-line flag."""

    field: str
    names: tuple[str, ...]
    """Spellings; the field's name if it is positional."""
    kind: Any
    required: bool
    default: Any
    is_positional: bool = False
    names_run: bool = False

    @property
    def is_switch(self) -> bool:
        return bool in _list_union_members(self.kind)

    @property
    def is_list(self) -> bool:
        return any(get_origin(kind) in (tuple, list) for kind in _list_union_members(self.kind))


def list_flags(options: type[Struct]) -> list[Flag]:
    """The flags of `options`, in the order of its fields."""
    return [_make_flag(field) for field in structs.fields(options)]


def parse_options(
    options: type[Options],
    words: Sequence[str],
    what: str,
    *,
    extra: bool = False,
    check_extra: Callable[[list[str]], None] | None = None,
) -> tuple[Options, list[str]]:
    """Read `words` into `options`.

    Args:
        options: Struct whose fields are the flags.
        words: The command line after the name.
        what: How errors name this part of the command line: ``runtime 'direct'``.
        extra: Whether unknown words are returned instead of rejected.
        check_extra: Called with the unknown words before missing flags are reported: one may be a misspelled flag.

    Raises:
        UsageError: A flag is unknown, lacks its value, has a wrong one or is missing.
    """
    flags = list_flags(options)
    given, unknown = _make_parser(flags, what).parse_known_args(list(words))
    if unknown and not extra:
        raise _build_unknown_word_error(unknown[0], flags, what)
    if unknown and check_extra:
        check_extra(unknown)
    values = {
        flag.field: convert_flag_value(flag, getattr(given, flag.field), what, options)
        for flag in flags
        if hasattr(given, flag.field)
    }
    missing = [flag for flag in flags if flag.required and flag.field not in values]
    if missing:
        doc = read_field_docs(options).get(missing[0].field, "")
        raise UsageError(f"{what} needs {_format_name(missing[0])}", doc)
    return options(**values), unknown


def describe_flags(options: type[Struct]) -> list[tuple[str, str]]:
    """Each flag as it is typed, with its meaning and default, for help; positional arguments first."""
    docs = read_field_docs(options)
    flags = sorted(list_flags(options), key=lambda flag: not flag.is_positional)
    return [(_format_flag(flag), docs.get(flag.field, "") + _format_default(flag)) for flag in flags]


def convert_flag_value(flag: Flag, value: Any, what: str, options: type[Struct] | None = None) -> Any:
    """Convert the typed `value` to the kind of the flag; an error quotes its help, from `options`.

    Raises:
        UsageError: It is not a valid value.
    """
    try:
        return msgspec.convert(value, flag.kind, strict=False)
    except msgspec.ValidationError as error:
        choices = list_choices(flag)
        reason = str(error).replace("`", "").replace("Expected", "expected").split(" - at")[0]
        reason = reason.replace(" | null", "").replace("null | ", "")
        typed = value if isinstance(value, list) else [str(value)]
        wrong = next((word for word in typed if word not in choices), "")
        hint = did_you_mean(wrong, choices) if choices else ""
        if options and not choices:
            hint = read_field_docs(options).get(flag.field, "")
        raise UsageError(f"{what}: {_format_name(flag)} {' '.join(typed)}: {reason}", hint) from None


def list_choices(flag: Flag) -> list[str]:
    """The values that the flag can have, if it has a fixed set of them."""
    return [str(choice) for kind in _list_union_members(flag.kind) for choice in _list_choices(kind)]


def _list_choices(kind: Any) -> list[Any]:
    """The members of a Literal, also of a sequence of one."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [
        choice for each in get_args(kind) for member in _list_union_members(each) for choice in _list_choices(member)
    ]


def _make_flag(field: msgspec.structs.FieldInfo) -> Flag:
    extra = _read_extra(field.type)
    names_run = extra.get("names") == "run"
    default = None if field.required else field.default
    if extra.get("positional"):
        return Flag(
            field.name, (field.name,), field.type, field.required, default, is_positional=True, names_run=names_run
        )
    name = field.name.removesuffix("_")  # of a word of Python: with_
    dashed = "--" + name.replace("_", "-")
    names = tuple(dict.fromkeys([*extra.get("short", ()), dashed, f"--{name}", *extra.get("aliases", ())]))
    return Flag(field.name, names, field.type, field.required, default, names_run=names_run)


def _read_extra(kind: Any) -> dict[str, Any]:
    """What `Meta` says about a field, of an optional one about its value."""
    kinds = [kind, *get_args(kind)]  # of `RunName | None`, and of a tuple of them
    metas = [meta for each in kinds if get_origin(each) is Annotated for meta in get_args(each)[1:]]
    return next((meta.extra for meta in metas if isinstance(meta, Meta) and meta.extra), {})


def _list_union_members(kind: Any) -> tuple[Any, ...]:
    """Members of a union, `Annotated` taken off everywhere; the type itself if it is not a union."""
    if get_origin(kind) is Annotated:
        return _list_union_members(get_args(kind)[0])
    is_union = get_origin(kind) is Union or type(kind).__name__ == "UnionType"
    return tuple(inner for member in get_args(kind) for inner in _list_union_members(member)) if is_union else (kind,)


def _make_formatter(prog: str) -> argparse.HelpFormatter:
    """A formatter of fixed width: argparse makes one for each option, and asks for the terminal's size each time."""
    return argparse.HelpFormatter(prog, width=100)


class _StoreOnce(argparse.Action):
    """Store a value; of two files, neither can be meant to be ignored."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        if earlier is not None and earlier != values:
            raise UsageError(f"{parser.prog}: {option} is given twice: {earlier} and {values}", "remove one of them")
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """argparse that raises errors of primus."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def _make_parser(flags: list[Flag], what: str) -> _Parser:
    parser = _Parser(
        prog=what,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_make_formatter,
    )
    for flag in flags:
        if flag.is_positional:
            parser.add_argument(flag.field, nargs="*" if flag.is_list else "?")
        elif flag.is_switch:
            parser.add_argument(*flag.names, dest=flag.field, action="store_true")
            long = [name[2:] for name in flag.names if name.startswith("--")]
            negations = {f"--no-{name}" for name in long} | {f"--no_{name}" for name in long}
            parser.add_argument(*sorted(negations), dest=flag.field, action="store_false")
        elif flag.is_list:
            parser.add_argument(*flag.names, dest=flag.field, nargs="+", action="extend")
        else:
            action = _StoreOnce if flag.field in FILES else "store"
            parser.add_argument(*flag.names, dest=flag.field, action=action)
    return parser


def _build_unknown_word_error(word: str, flags: list[Flag], what: str) -> UsageError:
    if word == "--":
        return UsageError(f"{what}: unexpected word '--'", "it separates runtimes and task; options follow the task")
    if not word.startswith("-"):
        taken = next((f"--{each}" for each in WORD_OPTIONS if any(flag.field == each for flag in flags)), "")
        hint = f"pass it as {taken} {word}" if taken else "separate runtimes and task by ' -- '"
        return UsageError(f"{what}: unexpected word '{word}'", hint)
    names = [name for flag in flags for name in flag.names if name.startswith("-") and "_" not in name]
    name = word.split("=")[0]
    return UsageError(f"{what}: unknown option {name}", did_you_mean(name, names) if names else "it takes no options")


def _format_name(flag: Flag) -> str:
    return flag.field.upper() if flag.is_positional else flag.names[0]


def _format_flag(flag: Flag) -> str:
    if flag.is_positional:
        shown = _format_name(flag) + ("..." if flag.is_list else "")
        return shown if flag.required else f"[{shown}]"
    names = [name for name in flag.names if "_" not in name]
    if flag.is_switch and flag.default:
        names += [f"--no-{name[2:]}" for name in names]
    return ", ".join(names) if flag.is_switch else f"{', '.join(names)} {_format_placeholder(flag)}"


def _format_placeholder(flag: Flag) -> str:
    kinds = [kind for kind in _list_union_members(flag.kind) if kind is not type(None)]
    choices = [str(choice) for kind in kinds if get_origin(kind) not in (list, tuple) for choice in get_args(kind)]
    if choices:
        return "|".join(choices)
    if flag.is_list:
        return "VALUE..."
    return {int: "N", float: "X", str: "TEXT"}.get(kinds[0], "VALUE")


def _format_default(flag: Flag) -> str:
    if flag.required:
        return " (required)"
    if flag.is_switch:
        return " (default: on)" if flag.default else ""
    is_silent = flag.default in (None, "", (), []) or flag.default is msgspec.NODEFAULT
    shown = " ".join(flag.default) if flag.is_list and not is_silent else flag.default
    return "" if is_silent else f" (default: {shown})"
