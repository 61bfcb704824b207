"""Contracts of plug-ins: a kind of plug-in has a Protocol, and a module is checked against it once, when it is loaded.

A Protocol lists the members of a plug-in file. A function or constant that a file may leave out is marked `optional`;
the body in the Protocol is its default. Functions take their arguments by position, so a file may name them freely.
"""

from __future__ import annotations

import collections.abc
import re
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from datetime import date
from functools import cache, wraps
from types import MethodType, ModuleType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Struct, structs

from primus.errors import PrimusError, edit_distance, find_nearest

if TYPE_CHECKING:
    import ast

ContractT = TypeVar("ContractT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

DOCUMENTATION = "docs/plug-ins.md"


def optional(function: FunctionT) -> FunctionT:
    """Marks a member of a Protocol that a plug-in may leave out; the body is the default."""
    function.__dict__["is_optional"] = True
    return function


class PlugInKind(Generic[ContractT]):
    """A kind of plug-in, with the Protocol that its modules implement.

    Args:
        name: Name of the kind, which is the folder in `$PRIMUS_PLUGINS`: ``runtimes``.
        contract: The Protocol.
        one_of: Members of which a plug-in needs at least one.
        implies: Optional members that need another one, by name: a task with `prepare` needs `work`.
    """

    def __init__(
        self, name: str, contract: type, one_of: tuple[str, ...] = (), implies: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.contract = contract
        self.one_of = one_of
        self.implies = implies or {}


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
        PrimusError: A member is missing, has another type or takes other arguments; the message names file, member and
            signature.
    """
    if (id(kind), id(module)) in _COMPLETE:
        return
    members = list_members(kind.contract)
    _check_presence(kind, members, module, label, file)
    if isinstance(module, ModuleType) and not is_built_in:
        _check_spelling(members, module, label, file)
    for member in members:
        if hasattr(module, member.name) and not is_built_in:
            value = getattr(module, member.name)
            _check_member(member, value, label, file)
            _check_results(member, module, value, label, file)
    for member in members:
        if not hasattr(module, member.name):
            default = member.function(module) if member.is_property else MethodType(member.function, module)
            try:
                setattr(module, member.name, default)
            except (AttributeError, TypeError) as error:
                raise PrimusError(f"{file}: {label}: {error}", "let the entry point name a module") from None
    _COMPLETE[id(kind), id(module)] = (kind, module)


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


def _check_member(member: ContractMember, value: object, label: str, file: str) -> None:
    """Refuse a constant of another type, and a function that cannot be called as its contract says.

    The types of parameters are left to a type checker.
    """
    expected = member.read_signature()
    hint = f"define {member.format_signature()} (see {DOCUMENTATION})"
    if expected is None:
        kind = get_type_hints(member.function)["return"]
        if not _is_instance(value, kind):
            text = member.function.__annotations__["return"]
            raise PrimusError(f"{file}: {label}: {member.name} is {_describe_value(value)}, not {text}", hint)
        problem = _find_wrong_field(value)
        if problem:
            raise PrimusError(f"{file}: {label}: {member.name}: {problem}", hint)
        return
    if value is None and member.is_property:
        return
    if not callable(value):
        raise PrimusError(f"{file}: {label}: {member.name} is not a function", hint)
    import inspect

    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a function of a C library need not tell
        return
    try:
        signature.bind(*expected.parameters)
    except TypeError as error:
        where = _locate_function(value, file)
        raise PrimusError(f"{where}: {label}: {member.name}{signature}: {error}", hint) from None


def _check_results(member: ContractMember, module: ModuleType, function: Any, label: str, file: str) -> None:
    """Replace a function of the plug-in by one that refuses a result of another type.

    Without the check, a result such as None fails far from the plug-in and looks like an error of this package. A
    function without a result may return anything.
    """
    signature = member.read_signature()
    if signature is None or signature.result == "None" or not callable(function):
        return

    @wraps(function)
    def call_and_check(*args: Any) -> Any:
        import ast  # `--help` calls no function

        result = function(*args)
        expected = ast.parse(signature.result, mode="eval").body
        place = f"{_locate_function(function, file)}: {label}: {member.name}"
        hint = f"define {member.format_signature()} (see {DOCUMENTATION})"
        if not _has_type(result, expected):
            if isinstance(result, Coroutine):  # else Python warns that it was never awaited
                result.close()
            raise PrimusError(f"{place} returned {_describe_value(result)}, not {signature.result}", hint)
        problem = _find_wrong_field(result)
        if problem:
            raise PrimusError(f"{place} returned a wrong {type(result).__name__}: {problem}", hint)
        if isinstance(expected, ast.Subscript) and isinstance(result, Iterator):
            return _check_elements(result, expected.slice, place, hint)
        return result

    setattr(module, member.name, call_and_check)


def _check_elements(values: Iterator[Any], annotation: ast.expr, place: str, hint: str) -> Iterator[Any]:
    """`values`, until one has another type; each type is compared once, so that a million texts cost little."""
    import ast

    accepted: set[type] = set()
    for value in values:
        if type(value) not in accepted:
            if not _has_type(value, annotation):
                raise PrimusError(f"{place} yielded {_describe_value(value)}, not {ast.unparse(annotation)}", hint)
            accepted.add(type(value))
        yield value


def _find_wrong_field(value: object) -> str:
    """What is wrong in the fields of a Struct, whose constructor accepts any type; empty if nothing is."""
    if not isinstance(value, Struct):
        return ""
    try:
        msgspec.convert(structs.asdict(value), type(value), from_attributes=True, builtin_types=(date,))
    except msgspec.ValidationError as error:
        return str(error).replace("`", "").replace("$.", "")
    except TypeError:  # it has a field of a type that msgspec does not read, such as a function
        pass
    return ""


def _locate_function(function: Any, file: str) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else file


def _describe_value(value: object) -> str:
    """The type of a value, and those of the elements of a collection."""
    if value is None:
        return "None"
    name = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    if isinstance(value, (Mapping, list, tuple)):
        elements = value.values() if isinstance(value, Mapping) else value
        return f"{name} of {', '.join(sorted({type(each).__name__ for each in elements})) or 'nothing'}"
    return name


def _has_type(value: object, annotation: ast.expr) -> bool:
    """Whether a result has the type of its annotation.

    Classes are compared by name, because a contract imports most of them for type checkers only. Elements of an
    iterator are not read: that would consume them.
    """
    import ast

    if isinstance(annotation, ast.BinOp):
        return _has_type(value, annotation.left) or _has_type(value, annotation.right)
    if isinstance(annotation, ast.Constant):
        return value is annotation.value
    elements: list[ast.expr] = []
    if isinstance(annotation, ast.Subscript):
        elements = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        annotation = annotation.value
    name = ast.unparse(annotation)
    if name == "type":
        return isinstance(value, type) and ast.unparse(elements[0]) in _list_class_names(value)
    if name == "tuple":  # a list works as well
        return isinstance(value, (tuple, list)) and _have_types(value, elements)
    if hasattr(collections.abc, name):
        abstract = getattr(collections.abc, name)
        if isinstance(value, str) or not isinstance(value, abstract):
            return False
        if isinstance(value, Mapping):
            return all(_has_type(each, elements[1]) for each in value.values())
        return not isinstance(value, Sequence) or all(_has_type(each, elements[0]) for each in value)
    # True is an int, but where an exit code is expected it would mean failure.
    return name in _list_class_names(type(value)) and (name == "bool" or not isinstance(value, bool))


def _have_types(values: Sequence[object], elements: list[ast.expr]) -> bool:
    import ast

    if len(elements) == 2 and isinstance(elements[1], ast.Constant) and elements[1].value is ...:
        return all(_has_type(each, elements[0]) for each in values)
    return len(values) == len(elements) and all(map(_has_type, values, elements))


def _list_class_names(kind: type) -> set[str]:
    return {base.__name__ for base in kind.__mro__}


def _is_instance(value: object, kind: Any) -> bool:
    """Whether a constant has the type of its annotation; the types of elements are left to a type checker."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_is_instance(value, each) for each in get_args(kind))
    if origin is type:
        return isinstance(value, type) and issubclass(value, get_args(kind)[0])
    if origin in (Collection, tuple):  # a list works where the contract has a tuple; text is a collection of letters
        return isinstance(value, Collection) and not isinstance(value, str)
    return isinstance(value, origin or kind)
