"""Links and paths in the documentation lead somewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

import generate
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
SOURCE = re.compile(r"`(src/primus/[\w./]+)(?:\*\.yaml)?`")


def list_anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_path_of_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = []
    for target, anchor in LINK.findall(re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            wrong.append(target)
        elif anchor and file.suffix == ".md" and anchor not in list_anchors(file):
            wrong.append(f"{target}#{anchor}")
    wrong += [path for path in SOURCE.findall(text) if not (ROOT / path).exists()]
    assert not wrong


def list_examples(text: str) -> set[str]:
    """Paths of the checkout's examples that a text names; a path behind another folder belongs to another checkout."""
    return {path.rstrip(".") for path in re.findall(r"(?<![\w/~}])(?:\./)?(examples/[\w./-]*\w)", text)}


def test_examples_that_a_page_names_exist() -> None:
    # documents.md quotes the documents of another project, whose files its test supplies.
    named = {page: list_examples(page.read_text(encoding="utf-8")) for page in PAGES if page.name != "documents.md"}
    assert sum(map(len, named.values())) > 20
    missing = {page.name: [path for path in paths if not (ROOT / path).exists()] for page, paths in named.items()}
    assert {page: paths for page, paths in missing.items() if paths} == {}


def test_a_named_example_is_noticed_in_prose_and_commands() -> None:
    text = "Run `--config=examples/a.yaml`, see ./examples/b/c.sh. Not ~/Primus/examples/d.yaml, ${HOME}/examples/e.\n"
    assert list_examples(text) == {"examples/a.yaml", "examples/b/c.sh"}


def test_lines_of_prose_have_at_most_120_characters() -> None:
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in [*PAGES, ROOT / "CHANGELOG.md"]
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120 and not re.match(r" *\||    ", line)  # tables and code
    ]
    assert not long


def test_a_missing_anchor_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One, two\n\n```\n# Not a heading\n```\n")
    assert list_anchors(tmp_path / "a.md") == {"one-two"}


def test_the_architecture_page_names_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page[page.index("## Packages") :]
    listed = {
        entry.removesuffix(".py") for entry in os.listdir(ROOT / "src/primus") if not entry.startswith(("_", "py."))
    }
    assert {name for name in listed if f"`{name}`" not in table} == set()


def test_the_files_of_the_architecture_page_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page[page.index("## What to change where") : page.index("## Packages")]
    named = re.findall(r"`(\w+/[\w/]*)(?:\*\.yaml|(\.py|\.yaml))?`", table)
    assert len(named) > 40
    assert [path + suffix for path, suffix in named if not (ROOT / "src/primus" / (path + suffix)).exists()] == []


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (generate.DOCS / name).read_text(encoding="utf-8") == generate.PAGES[name](), "run: make docs"
