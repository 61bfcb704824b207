"""Names say one thing: no class name is taken twice, and functions are verbs."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import primus

PACKAGE = Path(primus.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef

PARTICIPLE = re.compile(
    r"_?([a-z]+ed|begun|built|done|drawn|found|given|gone|held|kept|known|left|lost|made|said|seen|sent|shown|taken|told"
    r"|written)"
)
VERBS = {"embed", "feed", "need", "read", "seed", "speed", "_read"}
"""Verbs and nouns that end like participles."""
ONE_WORD_SHARE = 0.12
NESTED = {"Options", "Config"}
"""Classes that each plug-in, and each component of torchtitan, must have under this name."""


@cache
def list_definitions() -> list[tuple[str, Function | ast.ClassDef]]:
    """Every function and class of the package with its module; parsed once for all tests."""
    found: list[tuple[str, Function | ast.ClassDef]] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += [(module, node) for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef)]
    return found


def is_property(function: Function) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def list_functions() -> Iterator[tuple[str, Function]]:
    for module, node in list_definitions():
        if isinstance(node, Function) and not node.name.startswith("__") and not is_property(node):
            yield module, node


def test_no_two_classes_share_a_name() -> None:
    modules = defaultdict(list)
    for module, node in list_definitions():
        if isinstance(node, ast.ClassDef) and node.name not in NESTED:
            modules[node.name].append(module)
    assert not {name: places for name, places in modules.items() if len(places) > 1}


def test_no_function_is_a_bare_participle() -> None:
    found = {
        f"{module}:{function.name}"
        for module, function in list_functions()
        if PARTICIPLE.fullmatch(function.name) and function.name not in VERBS
    }
    assert not found


def test_few_functions_have_one_word_names() -> None:
    names = [function.name.strip("_") for _, function in list_functions()]
    one_word = [name for name in names if "_" not in name]
    assert len(one_word) <= ONE_WORD_SHARE * len(names), sorted(one_word)
