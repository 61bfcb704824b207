"""Check every example of a Primus checkout, as `config check` does, and count the results.

python tools/check_primus_examples.py PRIMUS_CHECKOUT [--list]
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
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


PAGE = Path(__file__).parent.parent / "docs/coming-from-primus.md"
BLOCK = re.compile(r"(?<=change it there. -->\n).*?(?=<!-- end -->)", re.DOTALL)
EXPERIMENT = re.compile(r"^(modules|extends|includes|bases)[ \t]*:", re.MULTILINE)
"""In an experiment; other YAML files of the folders are settings of Transformer Engine or variables."""
LANGUAGE_FRAMEWORKS = ("megatron", "megatron_bridge", "torchtitan", "maxtext", "moe_package")
"""Folders whose experiments are of the frameworks that are accepted as they are."""
MISSING_FILES = ("no such data", "load: no folder")
"""What is refused because a file is on another machine."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("checkout", type=Path)
    options.add_argument("--list", action="store_true", help="print each refused file")
    options.add_argument("--write", action="store_true", help="write the tables into the documentation")
    given = options.parse_args()
    checked = list(check_examples(given.checkout))
    print(format_counts(checked))
    if given.write:
        PAGE.write_text(BLOCK.sub(lambda _: f"\n{format_counts(checked)}\n\n", PAGE.read_text()))
    for example in checked if given.list else ():
        if example.problem:
            print(f"{example.file}\n    {example.problem}")


def check_examples(checkout: Path) -> Iterator[CheckedExample]:
    """The result of each file in a folder `configs` under `examples/`."""
    for file in sorted((checkout / "examples").rglob("configs/**/*.yaml")):
        if not EXPERIMENT.search(file.read_text(encoding="utf-8")):
            continue
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
        folders[find_kind(example)].append(example)
    rows = ["| examples/ | files | accepted | accepted where its data are | refused |", "|---|---|---|---|---|"]
    for name, each in sorted(folders.items()):
        refused = [example for example in each if example.problem]
        lacking = sum(lacks_files(example) for example in refused)
        rows.append(f"| {name} | {len(each)} | {len(each) - len(refused)} | {lacking} | {len(refused) - lacking} |")
    rows += ["", format_share(folders)]
    reasons: dict[str, list[str]] = defaultdict(list)
    for example in checked:
        if example.problem and not lacks_files(example):
            reasons[shorten_reason(example.problem)].append(find_kind(example))
    rows += ["", "| refused because | files | of |", "|---|---|---|"]
    ranked = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    rows += [f"| {reason} | {len(kinds)} | {', '.join(sorted(set(kinds)))} |" for reason, kinds in ranked]
    return "\n".join(rows)


def format_share(folders: dict[str, list[CheckedExample]]) -> str:
    """Share of the experiments for the engines here that are accepted, image models aside."""
    known = [example for name in LANGUAGE_FRAMEWORKS for example in folders.get(name, [])]
    accepted = [example for example in known if not example.problem or lacks_files(example)]
    return (
        f"Of {len(known)} experiments for Megatron, Megatron-Bridge, torchtitan and MaxText, {len(accepted)} are"
        f" accepted ({len(accepted) / len(known):.1%}); image models do not count."
    )


def lacks_files(example: CheckedExample) -> bool:
    """Whether an example is refused only because its data or weights are on another machine."""
    return any(text in example.problem for text in MISSING_FILES)


def find_kind(example: CheckedExample) -> str:
    """The folder of an example; image models of Megatron by themselves."""
    return f"{example.framework}/**/diffusion" if "/diffusion/" in example.file else example.framework


def shorten_reason(problem: str) -> str:
    """A problem without its file, line and pattern of layers, so that equal ones are counted together."""
    reason = re.sub(r"^[\w./ \-]+\.yaml(:\d+)?:? ?", "", problem).replace("|", " ")
    return re.sub(r"^(hybrid_layer_pattern): .*?: ", r"\1: ", reason)


if __name__ == "__main__":
    main()
