"""Build the site: `python docs/build_site.py`, or `make site`. It needs no network.

The pages are those of docs/ and a few of other folders; their links work on the site and in the repository. Zensical
makes HTML of them (docs/zensical.toml), and fails on a link that leads nowhere.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

from figures import FIGURES

from primus import SITE_ADDRESS
from primus.config.reference import SCHEMA_PATH, format_json_schema

DOCS = Path(__file__).parent
ROOT = DOCS.parent
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "measurements.md",
}
"""Pages that people look for in other places of a repository, and their names on the site."""
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
COLOR = re.compile(r"\x1b\[[\d;]*m")
FIGURE = re.compile(r"!\[[^\]]*\]\(pictures/figures/([\w-]+)\.svg\)")
FOLDER = re.compile(r'"([\w-]+)/"')
"""In the navigation: all pages of that folder."""


def main() -> None:
    """Write build/site, or exit with what Zensical says of the pages."""
    folder = ROOT / "build" / "site-source"
    shutil.rmtree(folder, ignore_errors=True)
    write_sources(folder)
    program = Path(sys.executable).parent / "zensical"
    done = subprocess.run([str(program), "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        report = COLOR.sub("", done.stdout + done.stderr).partition("Traceback")[0]
        sys.exit(f"{report}\nthe site was not built: see above; lines are those of {folder / 'docs'}")
    site = ROOT / "build" / "site"
    shutil.rmtree(site, ignore_errors=True)
    (folder / "site").rename(site)
    print(site / "index.html")


def write_sources(folder: Path) -> None:
    """Write all that Zensical reads."""
    pages = folder / "docs"
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("*.py", "*.toml", "*.md", "__pycache__"))
    for page in (*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in OUTSIDE)):
        target = pages / _place(page.relative_to(ROOT).as_posix())
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_convert_page(page, pages), encoding="utf-8")
    (pages / "decisions" / "index.md").write_text(_list_decisions(), encoding="utf-8")
    (pages / SCHEMA_PATH).parent.mkdir(parents=True, exist_ok=True)
    schema = format_json_schema() | ({"$id": SITE_ADDRESS + SCHEMA_PATH} if SITE_ADDRESS else {})
    (pages / SCHEMA_PATH).write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
    (folder / "zensical.toml").write_text(_format_settings(pages), encoding="utf-8")


def _place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path == "docs/decisions":
        return "decisions/index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE.get(path, f"files/{path}")


def _convert_page(page: Path, pages: Path) -> str:
    """The text of a page with the links of the site; charts become part of it, and follow its light and dark."""
    source = page.relative_to(ROOT).as_posix()
    start = posixpath.dirname(_place(source))

    def convert_link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        if found[2].startswith(("http:", "https:", "mailto:")) or not (ROOT / target).exists():
            return found[0]
        place = _place(target)
        if place.startswith("files/"):
            if (ROOT / target).is_dir():
                return "](#)"
            (pages / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / target, pages / place)
        return f"{found[1]}{posixpath.relpath(place, start or '.')}{found[3] or ''}{found[4]}"

    text = LINK.sub(convert_link, page.read_text(encoding="utf-8"))
    text = re.sub(r"\[([^\]]*)\]\(#\)", r"\1", text)  # a folder, which is no page of the site
    return FIGURE.sub(lambda found: f'<div class="figure">\n{FIGURES[found[1]].draw()}\n</div>', text)


def _list_decisions() -> str:
    rows = [
        f"- [{page.read_text(encoding='utf-8').splitlines()[0].removeprefix('# ')}]({page.name})"
        for page in sorted((DOCS / "decisions").glob("*.md"))
    ]
    return "\n".join(
        ["# Decisions", "", "Choices that someone may question, with their reasons and costs.", "", *rows, ""]
    )


def _format_settings(pages: Path) -> str:
    """docs/zensical.toml with the address of the site, and with the pages of folders in its navigation."""
    text = (DOCS / "zensical.toml").read_text(encoding="utf-8")
    if SITE_ADDRESS:
        text = text.replace("[project]\n", f'[project]\nsite_url = "{SITE_ADDRESS}"\n', 1)

    def list_folder(found: re.Match[str]) -> str:
        return json.dumps([path.relative_to(pages).as_posix() for path in sorted((pages / found[1]).glob("*.md"))])

    return FOLDER.sub(list_folder, text)


if __name__ == "__main__":
    main()
