"""Attribute docstrings of a Struct, read from its source: help, JSON Schema and reference docs come from them."""

from __future__ import annotations

from functools import cache

from msgspec import Struct


@cache
def read_field_docs(struct: type[Struct]) -> dict[str, str]:
    """The docstring below each field of `struct` and of those it extends, as one line, by field name."""
    docs: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, Struct) and base is not Struct:
            docs |= _own_docs(base)
    return docs


def _own_docs(struct: type[Struct]) -> dict[str, str]:
    # Here: every command reads flags, and only help and errors need their docs.
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def read_summary(struct: type[Struct]) -> str:
    """First line of the docstring of `struct`."""
    return (struct.__doc__ or "").strip().split("\n")[0]
