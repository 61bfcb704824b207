"""Check every example of a Primus checkout, as `config check` does, and count the results.

python tools/check_primus_examples.py PRIMUS_CHECKOUT [--list]
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from primus.errors import UsageError
from primus.experiment import resolve_experiment


class CheckedExample(Struct, frozen=True):
    """The result of one example file."""

    file: str
    framework: str
    problem: str = ""
    """Why it is refused; empty if it is accepted."""
    notes: tuple[str, ...] = ()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("checkout", type=Path)
    options.add_argument("--list", action="store_true", help="print each refused file")
    given = options.parse_args()
    checked = list(check_examples(given.checkout))
    print(format_counts(checked))
    if given.list:
        for example in checked:
            if example.problem:
                print(f"{example.file}\n    {example.problem}")


def check_examples(checkout: Path) -> Iterator[CheckedExample]:
    """The result of each file in a folder `configs` under `examples/`."""
    for file in sorted((checkout / "examples").rglob("configs/**/*.yaml")):
        name = str(file.relative_to(checkout / "examples"))
        try:
            resolved = resolve_experiment(file, (), {})
        except UsageError as error:
            problem = error.problem.replace(f"{checkout}/", "").splitlines()
            more = f" ... and {len(problem) - 1} more" if len(problem) > 1 else ""
            yield CheckedExample(name, name.split("/")[0], f"{problem[0]}{more}")
        else:
            yield CheckedExample(name, name.split("/")[0], "", resolved.notes)


def format_counts(checked: list[CheckedExample]) -> str:
    """A Markdown table of counts by folder, then one of the reasons."""
    folders: dict[str, list[CheckedExample]] = defaultdict(list)
    for example in checked:
        folders[example.framework].append(example)
    rows = ["| examples/ | files | accepted |", "|---|---|---|"]
    rows += [f"| {name} | {len(each)} | {sum(not e.problem for e in each)} |" for name, each in folders.items()]
    reasons = Counter(shorten_reason(each.problem) for each in checked if each.problem)
    rows += ["", "| refused because | files |", "|---|---|"]
    rows += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    return "\n".join(rows)


def shorten_reason(problem: str) -> str:
    """A problem without its file and line, so that equal ones are counted together."""
    return re.sub(r"^[\w./ \-]+\.yaml(:\d+)?:? ?", "", problem)


if __name__ == "__main__":
    main()
