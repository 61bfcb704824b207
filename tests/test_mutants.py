"""The tool that plants faults changes one thing at a time, and leaves a program behind."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("mutants", ROOT / "tools/mutants.py")
assert SPEC is not None and SPEC.loader is not None
mutants = importlib.util.module_from_spec(SPEC)
sys.modules["mutants"] = mutants
SPEC.loader.exec_module(mutants)

SOURCE = '''"""Docstrings 1 < 2 stay."""
LIMIT: int = 3


def check(values: list[int]) -> str | None:
    if len(values) < LIMIT and values:  # a comment
        print(f"{len(values) + 1} values")
    elif values == []:
        raise ValueError
    return (
        "many" if not values
        else str(2 * values[0])
    )
'''


def test_each_fault_changes_one_place_and_compiles() -> None:
    planted = [mutants.plant_fault(SOURCE, fault) for fault in mutants.list_faults(SOURCE)]
    for program in planted:
        compile(program, "planted", "exec")
        assert program.startswith('"""Docstrings 1 < 2 stay."""')
    assert len(set(planted)) == len(planted)
    expected = ("int = (4)", "(len(values) <= LIMIT) and", "elif (True):", " pass\n    elif", "return None", "[(1)]")
    for text in expected:
        assert sum(text in program for program in planted) == 1, text


def test_the_tests_of_a_module_are_those_that_mirror_it() -> None:
    found = {name: str(mutants.find_tests(Path("src/primus", name))) for name in ("registry.py", "runs/lock.py")}
    assert found == {"registry.py": "tests/test_registry.py", "runs/lock.py": "tests/runs/test_lock.py"}
    assert str(mutants.find_tests(Path("src/primus/tasks/runs/list.py"))) == "tests/tasks"
    with pytest.raises(SystemExit, match="name them with --tests"):
        mutants.find_tests(Path("src/primus/no_such_module.py"))
