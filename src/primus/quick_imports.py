"""Import msgspec and PyYAML without two steps that take a quarter of the time of a short command."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DeferredPattern:
    """A regular expression that is compiled when it is used."""

    def __init__(self, compile_pattern: Any, pattern: str, flags: int) -> None:
        self._compile_pattern, self._arguments = compile_pattern, (pattern, flags)

    def __getattr__(self, name: str) -> Any:
        compiled: re.Pattern[str] = self._compile_pattern(*self._arguments)
        self.match, self.search, self.sub, self.split = compiled.match, compiled.search, compiled.sub, compiled.split
        return getattr(compiled, name)


@contextmanager
def compile_patterns_on_use() -> Iterator[None]:
    """Defer the patterns of the modules that are imported in a `with`.

    The pattern of PyYAML's reader (yaml/reader.py, NON_PRINTABLE) takes 8 ms to compile, and its reader in C does not
    use it. It is compiled if the reader in Python is used.
    """
    compile_pattern = re.compile

    def defer_pattern(pattern: Any, flags: Any = 0) -> Any:
        return DeferredPattern(compile_pattern, pattern, flags)

    re.compile = defer_pattern
    try:
        yield
    finally:
        re.compile = compile_pattern


def import_msgspec() -> None:
    """Import msgspec without typing_extensions, which imports `inspect`, where `typing` has what it uses.

    Source: msgspec/_utils.py takes get_type_hints, Required and NotRequired, which Python 3.11 has.
    """
    name = "typing_extensions"
    if sys.version_info >= (3, 11) and name not in sys.modules:
        sys.modules[name] = None  # type: ignore[assignment]
        try:
            import msgspec  # noqa: F401
        finally:
            del sys.modules[name]
