"""Contracts of plug-ins: a kind of plug-in has a Protocol, and a module is checked against it once, when it is loaded.

A Protocol lists the members of a plug-in file. A function that a file may leave out is marked `optional`, and its body
is the default; a constant is marked `optional_value`. Functions take their arguments by position, so a file may name
them freely.

A check compares which members there are, how many arguments each takes, and the class of a constant or result, without
which None fails far from the plug-in. All other types are left to mypy (`python -m primus.plug_in_check`).
"""

from __future__ import annotations

import collections.abc
import importlib
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache, partial, wraps
from types import MethodType, ModuleType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from primus.errors import PrimusError, edit_distance, find_nearest

ContractT = TypeVar("ContractT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

DOCUMENTATION = "docs/plug-ins.md"


def optional(function: FunctionT) -> FunctionT:
    """Marks a function of a Protocol that a plug-in may leave out; its body is the default."""
    function.__dict__["is_optional"] = True
    return function


def optional_value(default: object) -> Callable[[FunctionT], FunctionT]:
    """Marks a constant of a Protocol, written as a property, that a plug-in may leave out."""

    def mark(getter: FunctionT) -> FunctionT:
        getter.__dict__["default"] = default
        return optional(getter)

    return mark


class PlugInKind(Struct, Generic[ContractT], eq=False):
    """A kind of plug-in, with the Protocol that its modules implement."""

    name: str
    """Name of the kind, which is the folder in `$PRIMUS_PLUGINS`: ``runtimes``."""
    contract: type
    """The Protocol."""
    one_of: tuple[str, ...] = ()
    """Members of which a plug-in needs at least one."""
    implies: Mapping[str, str] = {}
    """Optional members that need another one, by name: a task with `prepare` needs `work`."""
    modules: Mapping[str, str] = {}
    """Functions that a package may define in a module of its own, which is imported when they are called."""


class MemberSignature(NamedTuple):
    """The parameters of a function, each as ``name: type``, and the type of its result."""

    parameters: tuple[str, ...]
    result: str


class ContractMember(NamedTuple):
    """One function or constant of a contract."""

    name: str
    function: Callable[..., Any]
    """The function in the Protocol; for a constant, the getter of its property."""
    is_property: bool

    @property
    def is_optional(self) -> bool:
        return "is_optional" in self.function.__dict__

    @property
    def documentation(self) -> str:
        """The docstring as one paragraph a line."""
        import inspect  # takes 30 ms, and only messages and the documentation need it

        paragraphs = (inspect.getdoc(self.function) or "").split("\n\n")
        return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

    def read_signature(self) -> MemberSignature | None:
        """The signature of a function, without `self`; None for a constant.

        A function whose absence has a meaning is a property of type ``Callable[[A, B], R] | None``. Its parameters are
        named in its docstring, ``Function `name(a, b)` ...``.
        """
        annotations = self.function.__annotations__
        if not self.is_property:
            code = self.function.__code__
            parameters = code.co_varnames[1 : code.co_argcount]
            return MemberSignature(tuple(f"{name}: {annotations[name]}" for name in parameters), annotations["return"])
        import ast  # only messages and the documentation need it

        annotation = ast.parse(annotations["return"], mode="eval").body
        if not annotations["return"].startswith("Callable[") or not isinstance(annotation, ast.BinOp):
            return None
        function = annotation.left
        assert isinstance(function, ast.Subscript) and isinstance(function.slice, ast.Tuple)
        types, result = function.slice.elts
        assert isinstance(types, ast.List)
        named = re.match(rf"Function `{self.name}\((.*?)\)`", self.documentation)
        assert named, f"the docstring of {self.name} does not name its parameters"
        names = named[1].split(", ") if named[1] else []
        pairs = zip(names, map(ast.unparse, types.elts), strict=True)
        return MemberSignature(tuple(f"{name}: {kind}" for name, kind in pairs), ast.unparse(result))

    def format_signature(self) -> str:
        """The member as an author writes it: ``train(experiment: Experiment, attempt: Attempt) -> None``."""
        signature = self.read_signature()
        if signature is None:
            return f"{self.name}: {self.function.__annotations__['return'].removesuffix(' | None')}"
        return f"{self.name}({', '.join(signature.parameters)}) -> {signature.result}"


@cache
def list_members(contract: type) -> tuple[ContractMember, ...]:
    """The members of a Protocol in the order of their definition, inherited ones first."""
    found: dict[str, ContractMember] = {}
    for base in reversed(contract.__mro__):
        if base in (object, Protocol, Generic):
            continue
        for name, value in vars(base).items():
            if isinstance(value, property) and value.fget is not None:
                found[name] = ContractMember(name, value.fget, is_property=True)
            elif callable(value) and (not name.startswith("_") or name == "__call__"):
                found[name] = ContractMember(name, value, is_property=False)
    return tuple(found.values())


_COMPLETE: dict[tuple[int, int], tuple[object, object]] = {}
"""Kind and module of each completed plug-in by their `id`, since an entry point may name an object without a hash. The
values keep both alive, so that no `id` is used twice."""


def complete_module(kind: PlugInKind[Any], module: ModuleType, label: str, file: str, is_built_in: bool) -> None:
    """Check that `module` implements the contract of `kind`, and give it the defaults of what it leaves out.

    A module is checked once for each kind that it is loaded as: defaults that were added must not count as its own.

    Args:
        kind: The kind that the module is loaded as.
        module: The imported plug-in; an entry point may name another object with the same members.
        label: The plug-in in messages: ``runtime 'box'``.
        file: Its file in messages.
        is_built_in: Whether it is part of this package, whose members a test compares with the contract.

    Raises:
        PrimusError: A member is missing, has another class or takes other arguments; the message names file, member and
            signature.
    """
    if (id(kind), id(module)) in _COMPLETE:
        return
    members = list_members(kind.contract)
    _add_functions_of_modules(kind, module)
    _check_presence(kind, members, module, label, file)
    if isinstance(module, ModuleType) and not is_built_in:
        _check_spelling(members, module, label, file)
    for member in members:
        if hasattr(module, member.name) and not is_built_in:
            _check_member(member, module, label, file)
    for member in members:
        if not hasattr(module, member.name):
            function = member.function
            default = function.__dict__["default"] if member.is_property else MethodType(function, module)
            try:
                setattr(module, member.name, default)
            except (AttributeError, TypeError) as error:
                raise PrimusError(f"{file}: {label}: {error}", "let the entry point name a module") from None
    _COMPLETE[id(kind), id(module)] = (kind, module)


def _add_functions_of_modules(kind: PlugInKind[Any], module: ModuleType) -> None:
    """Give a package the functions that it defines in modules; these may need what is not installed everywhere."""
    for name, part in kind.modules.items():
        files = [os.path.join(folder, *part.split(".")) + ".py" for folder in getattr(module, "__path__", ())]
        if not hasattr(module, name) and any(map(os.path.exists, files)):
            setattr(module, name, partial(_call_function, f"{module.__name__}.{part}", name))


def _call_function(module: str, name: str, *args: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args)


def _check_presence(
    kind: PlugInKind[Any], members: Sequence[ContractMember], module: ModuleType, label: str, file: str
) -> None:
    missing = [each for each in members if not each.is_optional and not hasattr(module, each.name)]
    if not missing and not any(hasattr(module, name) for name in kind.one_of):
        missing = [each for each in members if each.name in kind.one_of][:1]
    needed = {kind.implies[name] for name in kind.implies if getattr(module, name, None)}
    missing += [each for each in members if each.name in needed and not hasattr(module, each.name)]
    if missing:
        problem = f"{file}: {label} has no {' and no '.join(each.name for each in missing)}"
        if missing[0].name in kind.one_of:
            problem = f"{file}: {label} has neither {' nor '.join(kind.one_of)}"
        signatures = "; ".join(each.format_signature() for each in missing)
        raise PrimusError(problem, f"define {signatures} (see {DOCUMENTATION})")


def _check_spelling(members: Sequence[ContractMember], module: ModuleType, label: str, file: str) -> None:
    """Refuse a function or constant that is named almost like an optional member: nothing would use it."""
    absent = [member.name for member in members if not hasattr(module, member.name)]
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", None) == module.__name__ if callable(value) else name.isupper()
        if name.startswith("_") or not is_own:
            continue
        nearest = find_nearest(name, absent)
        if nearest and edit_distance(name, nearest, 2) <= 2:  # `doc` may be any function
            where = _locate_function(value, file)
            hint = f"did you mean '{nearest}'? If not, begin the name with an underscore (see {DOCUMENTATION})"
            raise PrimusError(f"{where}: {label}: {name} is never used", hint)


def _check_member(member: ContractMember, module: ModuleType, label: str, file: str) -> None:
    """Refuse a constant of another class and a function with other parameters; let a function check its results."""
    value = getattr(module, member.name)
    expected = member.read_signature()
    hint = f"define {member.format_signature()} (see {DOCUMENTATION})"
    if expected is None:
        kind = member.function.__annotations__["return"]
        if not _has_class(value, kind):
            raise PrimusError(f"{file}: {label}: {member.name} is {_describe_class(value)}, not {kind}", hint)
        return
    if value is None and member.is_property:
        return
    if not callable(value):
        raise PrimusError(f"{file}: {label}: {member.name} is not a function", hint)
    import inspect  # takes 9 ms

    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a function of a C library need not tell
        pass
    else:
        try:
            signature.bind(*expected.parameters)
        except TypeError as error:
            where = _locate_function(value, file)
            raise PrimusError(f"{where}: {label}: {member.name}{signature}: {error}", hint) from None
    if expected.result != "None":  # a function without a result may return anything
        place = f"{_locate_function(value, file)}: {label}: {member.name}"
        setattr(module, member.name, _check_results(value, expected.result, place, hint))


def _check_results(function: Callable[..., Any], expected: str, place: str, hint: str) -> Callable[..., Any]:
    """`function`, which refuses a result of another class than `expected` names."""

    @wraps(function)
    def call_and_check(*args: Any) -> Any:
        result = function(*args)
        if not _has_class(result, expected):
            if isinstance(result, Coroutine):  # else Python warns that it was never awaited
                result.close()
            raise PrimusError(f"{place} returned {_describe_class(result)}, not {expected}", hint)
        return result

    return call_and_check


def _locate_function(function: Any, file: str) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else file


def _describe_class(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else type(value).__name__


def _has_class(value: object, annotation: str) -> bool:
    """Whether a value has a class of its annotation, whatever its elements are.

    Classes are compared by name, because a contract imports most of them for type checkers only.
    """
    names = re.sub(r"\[.*?\](?= \||$)", "", annotation).split(" | ")
    if value is None or isinstance(value, bool):  # True is an int, but as an exit code it would mean failure
        return ("None" if value is None else "bool") in names
    if isinstance(value, str):  # it is a collection of letters
        return "str" in names
    abstract = tuple(getattr(collections.abc, name) for name in names if hasattr(collections.abc, name))
    own = {base.__name__ for base in type(value).__mro__} | ({"tuple"} if isinstance(value, list) else set())
    return isinstance(value, abstract) or not own.isdisjoint(names)
