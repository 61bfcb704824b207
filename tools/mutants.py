"""`make mutants ARGS="src/primus/registry.py --number 20"`: plant one fault at a time, and see which ones tests notice.

A fault is a small change of one expression or statement: another comparison, a number off by one, a dropped call. The
tests are those of the module's folder; the ones that have run the changed lines in their own process come first. Both
are a copy of the checkout's tracked files, so that nothing is left behind if the command is killed. A fault that no
test notices is printed as SURVIVED: it is dead code, an equivalent program, or a missing test.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
MIN_LIMIT_S = 30.0
MOST_FIRST_TESTS = 40


class Fault(NamedTuple):
    """A node of a module, and the text in its place."""

    node: ast.expr | ast.stmt
    text: str


def list_faults(source: str) -> list[Fault]:
    """All faults of a module, in the order of its lines."""
    tree = ast.parse(source)
    return sorted(
        (Fault(place, ast.unparse(changed)) for node in _list_code(tree) for place, changed in _change_node(node)),
        key=lambda fault: (fault.node.lineno, fault.node.col_offset),
    )


def _list_code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Expressions and statements that run: without annotations, docstrings and texts."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            # Python below 3.12 has no positions inside of f-strings.
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            yield from _list_code(child)


def _change_node(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    place, changed = node, copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            changed.ops = [COMPARISONS[type(op)]()]
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            changed.op = OPERATORS[type(op)]()
        case ast.BoolOp(op=op):
            changed.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            changed = changed.operand
        case ast.Constant(value=bool()):
            changed.value = not changed.value
        case ast.Constant(value=int() | float()):
            changed.value += 1
        case ast.Expr(value=ast.Call()) | ast.Raise():
            changed = ast.Pass()
        case ast.Return(value=ast.expr()) if not isinstance(changed.value, ast.Constant):
            changed.value = ast.Constant(None)
        case ast.IfExp():
            changed.body, changed.orelse = changed.orelse, changed.body
        case ast.If():
            place, changed = node.test, ast.Constant(True)
        case _:
            return
    yield place, changed


def plant_fault(source: str, fault: Fault) -> str:
    """The module with the fault; all other lines keep their text."""
    lines = source.encode().splitlines(keepends=True)
    node = fault.node
    assert node.end_lineno is not None and node.end_col_offset is not None
    indented = fault.text.replace("\n", f"\n{' ' * node.col_offset}")
    # In parentheses: the expression around it may bind tighter.
    text = indented if isinstance(node, ast.stmt) else f"({indented})"
    before, after = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
    lines[node.lineno - 1 : node.end_lineno] = [before + text.encode() + after]
    return b"".join(lines).decode()


def find_tests(module: Path) -> Path:
    """The folder or file of tests that mirrors a module: the nearest one that exists."""
    parts = module.with_suffix("").parts[2:]
    for length in range(len(parts), 0, -1):
        folder = Path("tests", *parts[:length])
        file = folder.with_name(f"test_{folder.name}.py")
        found = next((each for each in (file, folder) if (ROOT / each).exists()), None)
        if found:
            return found
    raise SystemExit(f"{module}: no tests mirror it; name them with --tests")


def run_tests(folder: Path, tests: list[str], limit_s: float | None, *options: str) -> bool:
    """Whether the tests pass in the copy; a test that takes too long does not."""
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *options, *tests]
    environ = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        argv, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(limit_s) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what the tests have started
            return False


def record_visits(folder: Path, module: Path, tests: list[str]) -> list[tuple[float, str, list[int]]]:
    """Seconds, id and visited lines of `module` of each test, the fastest first.

    Raises:
        SystemExit: A test fails without a fault.
    """
    answer = folder / "visits.json"
    os.environ.update(MUTANTS_MODULE=str(folder / module), MUTANTS_VISITS=str(answer))
    shutil.copy(ROOT / "tools/mutants_visits.py", folder / "src")
    if not run_tests(folder, tests, None, "-p", "mutants_visits"):
        raise SystemExit(f"{' '.join(tests)}: the tests fail without a fault")
    return [(seconds, test, lines) for seconds, test, lines in json.loads(answer.read_text())]


def copy_checkout(folder: Path) -> None:
    """Copy the tracked files as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)  # recorded trees have links to folders


def try_module(folder: Path, module: Path, options: argparse.Namespace) -> tuple[int, int]:
    """Plant faults in a module of the copy; gives how many, and how many of them were noticed."""
    tests = options.tests or [str(find_tests(module))]
    source = (folder / module).read_text(encoding="utf-8")
    faults = list_faults(source)
    chosen = random.Random(options.seed).sample(faults, min(options.number, len(faults)))
    started = time.monotonic()
    visits = record_visits(folder, module, tests)
    limit_s = max(MIN_LIMIT_S, 3 * (time.monotonic() - started))
    num_noticed = 0
    for fault in sorted(chosen, key=lambda fault: fault.node.lineno):
        (folder / module).write_text(plant_fault(source, fault), encoding="utf-8")
        changed = set(range(fault.node.lineno, (fault.node.end_lineno or fault.node.lineno) + 1))
        first = [test for _, test, lines in visits if not changed.isdisjoint(lines)][:MOST_FIRST_TESTS]
        is_noticed = not ((not first or run_tests(folder, first, limit_s)) and run_tests(folder, tests, limit_s))
        num_noticed += is_noticed
        before = (ast.get_source_segment(source, fault.node) or "").partition("\n")[0]
        after = fault.text.partition("\n")[0]
        print(
            f"{'noticed ' if is_noticed else 'SURVIVED'} {module}:{fault.node.lineno}  {before}  ->  {after}",
            flush=True,
        )
    (folder / module).write_text(source, encoding="utf-8")
    return len(chosen), num_noticed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="+", type=Path, help="files below src/primus, relative to the checkout")
    parser.add_argument("--number", type=int, default=10, help="faults of each module, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="tests to run (default: those that mirror the module)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        copy_checkout(Path(name))
        counts = [try_module(Path(name), module, options) for module in options.modules]
    num_faults, num_noticed = (sum(each) for each in zip(*counts, strict=True))
    print(f"{num_noticed} of {num_faults} faults were noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
