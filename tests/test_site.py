"""The site of docs/: whole, up to date, readable without scripts and without a network, and searchable in a browser."""

from __future__ import annotations

import functools
import html
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import figures
import pytest

import browser
from primus.config.reference import SCHEMA_PATH, format_json_schema

ROOT = Path(__file__).parents[1]
LINK = re.compile(r'<(?:a|link|script|img)\b[^>]*?\b(?:href|src)="?([^"> ]+)')
RESOURCE = re.compile(
    r'<(?:link rel="?(?:stylesheet|icon|preload)"?|script|img|iframe)\b[^>]*?\b(?:href|src)="?(https?:|//)'
)
ANCHOR = re.compile(r'\b(?:id|name)="?([^"> ]+)')
IS_INLINE = ("http:", "https:", "mailto:", "data:", "javascript:")
LIMIT_S = 45.0
"""How long a page waits for the browser."""


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, built once."""
    pytest.importorskip("zensical", reason="zensical needs Python 3.11")
    command = [sys.executable, str(ROOT / "docs/build_site.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).parent


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """The text of every page, by its path."""
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_every_page_is_in_the_navigation_once(site: Path) -> None:
    settings = (site.parent / "site-source/zensical.toml").read_text(encoding="utf-8")
    listed = re.findall(r'"([\w/.-]+\.md)"', settings)
    source = site.parent / "site-source/docs"
    assert sorted(listed) == sorted(path.relative_to(source).as_posix() for path in source.rglob("*.md"))


def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[str, str]) -> None:
    anchors = {name: {html.unescape(found) for found in ANCHOR.findall(text)} for name, text in pages.items()}
    wrong = set()
    for name, text in pages.items():
        for link in LINK.findall(text):
            target, _, anchor = html.unescape(link).partition("#")
            if target.startswith(IS_INLINE) or name == "404.html":
                continue
            file = (site / name).parent / target.partition("?")[0] if target else site / name
            place = Path(*file.resolve().relative_to(site).parts).as_posix()
            if not file.is_file() or (anchor and place in anchors and anchor not in anchors[place]):
                wrong.add((name, link))
    assert not wrong


def test_a_browser_loads_nothing_from_elsewhere(site: Path, pages: dict[str, str]) -> None:
    assert {name for name, text in pages.items() if RESOURCE.search(text)} == set()
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles
    assert not [style for style in styles if re.search(r"@import|url\(.?(https?:|//)", style)]


def test_the_published_schema_is_that_of_the_package(site: Path) -> None:
    published = json.loads((site / SCHEMA_PATH).read_text(encoding="utf-8"))
    assert {**published, "$id": ""} == {**json.loads(json.dumps(format_json_schema())), "$id": ""}


def test_every_chart_says_its_day_and_is_part_of_its_page(pages: dict[str, str]) -> None:
    page = " ".join(pages["figures.html"].split())
    assert page.count('class="chart wide"') == page.count('class="chart narrow"') == len(figures.FIGURES)
    for figure in figures.FIGURES.values():
        record = json.loads((figures.RESULTS / figure.record).read_text(encoding="utf-8"))
        day = record["machine"].get("date") or record["created"][:10]
        assert re.search(
            rf"{day}, 2 CPU cores[^<]*<a[^>]*>What was measured</a>[^<]*<code>{figure.record}</code>", page
        )
    assert ">3,870 tokens/s<" in page  # of native in bf16


def test_a_page_is_whole_without_scripts(pages: dict[str, str]) -> None:
    text = re.sub(r"<script.*?</script>", "", pages["quickstart.html"], flags=re.DOTALL)
    assert "./primus-cli direct -- train pretrain --config examples/quickstart.yaml" in html.unescape(
        re.sub(r"<[^>]*>", "", text)
    )
    for place in ("first-steps.html", "container.html", "troubleshooting.html", "glossary.html"):
        assert f'href="{place}"' in text or f'href="./{place}"' in text


@contextmanager
def serve(site: Path, page: str) -> Iterator[str]:
    """The address of a page of the test within the site. Its image `/wait` holds the browser until it asks for
    `/found`, so that what the browser prints contains the result."""
    is_found = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/wait":
                is_found.wait(LIMIT_S)
            if self.path == "/found":
                is_found.set()
            if self.path != "/test.html":
                return super().do_GET()
            body = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/test.html"
        is_found.set()
        server.shutdown()


SEARCH = """<img src="/wait"><script>
const all = (root) => [...root.querySelectorAll("*")].flatMap((e) => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
let isTyped = false;
setInterval(() => {
  const input = all(document).find((e) => e.matches("input[role=combobox]"));
  if (!input) return document.querySelector(".md-search__button").click();
  if (!isTyped) { input.value = "CUDA out of memory"; input.dispatchEvent(new Event("input", {bubbles: true})); }
  isTyped = true;
  const links = all(document).filter((e) => e.tagName == "A" && e.getRootNode() != document);
  if (links.length) { document.body.dataset.found = links.map((e) => e.href).join(" "); fetch("/found"); }
}, 200);
</script></body>"""


def test_the_search_of_the_site_finds_a_message_in_the_index_of_troubles(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    with serve(site, index.replace("</body>", SEARCH)) as address:
        found = re.search(r'data-found="([^"]*)"', browser.dom(address))
    assert found, "no result"
    assert any("/troubleshooting.html" in link for link in found[1].split())


WIDTHS = """<!doctype html><body><img src="/wait"><script>
const widths = {};
for (const page of PAGES) {
  const frame = document.createElement("iframe");
  frame.style.cssText = "width: 390px; height: 800px; border: 0";
  frame.src = page;
  frame.onload = () => setTimeout(() => {
    widths[page] = frame.contentDocument.documentElement.scrollWidth;
    if (Object.keys(widths).length == PAGES.length) {
      document.body.dataset.found = JSON.stringify(widths);
      fetch("/found");
    }
  }, 100);
  document.body.append(frame);
}
</script></body>"""
WIDE_PAGES = ["index.html", "figures.html", "models.html", "troubleshooting.html", "reference/configuration.html"]


def test_no_page_is_wider_than_a_phone(site: Path) -> None:
    with serve(site, WIDTHS.replace("PAGES", json.dumps(WIDE_PAGES))) as address:
        found = re.search(r'data-found="([^"]*)"', browser.dom(address))
    assert found
    widths = json.loads(html.unescape(found[1]))
    assert widths.keys() == set(WIDE_PAGES)
    assert {page: width for page, width in widths.items() if not 300 < width <= 390} == {}
