"""Fields of a Struct, computed once: resolving the annotations of all groups takes 20 ms."""

from __future__ import annotations

from functools import cache

from msgspec import Struct, structs


@cache
def list_fields(struct: type[Struct]) -> tuple[structs.FieldInfo, ...]:
    """The fields of `struct` with their types, in the order of the class."""
    return structs.fields(struct)
