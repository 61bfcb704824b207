"""A report as a single HTML file: no script, no external resources, light or dark mode from the system."""

from __future__ import annotations

import html as markup
from collections.abc import Sequence

MANY_SECTIONS = 4
"""Number of sections from which a page starts with a table of contents."""

STACKED_COLUMNS = 4
"""Columns from which each cell of a row is a line on a narrow screen, with the name of its column in front."""

SIGNS = {"ok": "&#10003;", "info": "i", "warn": "!", "unknown": "?", "fail": "&#10005;"}
"""Sign of a badge, in addition to its color and word."""


class Html(str):
    """Text that is already markup; other text is escaped when it is added to a page."""

    __slots__ = ()


def escape(text: object) -> Html:
    """`text` as markup; `Html` is not escaped again."""
    return text if isinstance(text, Html) else Html(markup.escape(str(text)))


def make_element(name: str, content: object, **attributes: str) -> Html:
    """One HTML element; `class_` and the like have a trailing underscore."""
    shown = "".join(f' {key.rstrip("_")}="{markup.escape(value)}"' for key, value in attributes.items() if value)
    return Html(f"<{name}{shown}>{escape(content)}</{name}>")


def join_fragments(*parts: object) -> Html:
    """Fragments joined by line breaks."""
    return Html("\n".join(escape(part) for part in parts))


def make_paragraph(text: object) -> Html:
    """Paragraph of text."""
    return make_element("p", text)


def make_badge(status: str, word: str = "") -> Html:
    """A status (see `SIGNS`) by color, sign and word, so that it is readable in print and without colors."""
    return make_element("span", Html(f"<i>{SIGNS[status]}</i>{escape(word or status)}"), class_=f"badge {status}")


def make_table(header: Sequence[object], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> Html:
    """Table of rows with an optional header; cells are escaped unless they are `Html`, `right` are numbers."""
    head = f"<thead>{_make_row('th', header, right)}</thead>\n" if any(header) else ""
    is_stacked = len(header) >= STACKED_COLUMNS
    body = "\n".join(_make_row("td", row, right, header if is_stacked else ()) for row in rows)
    kind = "wide stacked" if is_stacked else "wide"
    return Html(f'<div class="{kind}"><table>\n{head}<tbody>\n{body}\n</tbody>\n</table></div>')


def make_details(summary: object, content: object, *, is_open: bool = False) -> Html:
    """Collapsible content, which is expanded in print."""
    opened = " open" if is_open else ""
    return Html(f"<details{opened}><summary>{escape(summary)}</summary>\n{escape(content)}\n</details>")


def format_page(title: str, sections: Sequence[tuple[str, object]], subtitle: object = "") -> str:
    """The page: sections with heading and content (escaped unless it is `Html`)."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>',
            f"<style>{STYLE}</style></head>",
            f"<body><main>\n<header>{make_element('h1', title)}{make_paragraph(subtitle) if subtitle else ''}</header>",
            *_make_contents(sections),
            *(
                f'<section id="part-{i}">\n{make_element("h2", heading) if heading else ""}\n'
                f"{escape(content)}\n</section>"
                for i, (heading, content) in enumerate(sections, start=1)
            ),
            "</main></body>",
            "</html>",
            "",
        ]
    )


def _make_contents(sections: Sequence[tuple[str, object]]) -> list[str]:
    links = [
        make_element("a", heading, href=f"#part-{i}") for i, (heading, _) in enumerate(sections, start=1) if heading
    ]
    return [f"<nav>{' '.join(links)}</nav>"] if len(links) >= MANY_SECTIONS else []


def _make_row(cell: str, values: Sequence[object], right: Sequence[int], names: Sequence[object] = ()) -> str:
    cells = []
    for i, value in enumerate(values):
        name = {"data-name": str(names[i])} if i < len(names) else {}
        cells.append(make_element(cell, value, class_="number" if i in right else "", **name))
    return f"<tr>{''.join(cells)}</tr>"


STYLE = """
:root { color-scheme: light dark; --ground: #fbfbfa; --card: #ffffff; --ink: #1d1f24; --soft: #5d636f; --line: #e2e3e7;
  --accent: #2456a6; --ok: #0a6b4a; --info: #2456a6; --warn: #855300; --unknown: #6a4a8f; --fail: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15171b; --card: #1c1f25; --ink: #e6e7ea; --soft: #a0a6b2; --line: #31353e;
    --accent: #8ab4f8; --ok: #5fd0a2; --info: #8ab4f8; --warn: #f0b95a; --unknown: #c7a6ee; --fail: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
header { margin-bottom: 1.5rem; }
h1 { font-size: 1.75rem; line-height: 1.25; font-weight: 650; letter-spacing: -0.01em; margin: 0; }
header p { color: var(--soft); margin: 0.35rem 0 0; }
h2 { font-size: 1.15rem; font-weight: 650; margin: 2.25rem 0 0.75rem; }
h3 { font-size: 1rem; font-weight: 650; margin: 1.5rem 0 0.5rem; }
p { margin: 0.5rem 0; max-width: 60rem; }
a { color: var(--accent); }
nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; padding: 0.6rem 0; border-block: 1px solid var(--line); }
nav a { text-decoration: none; } nav a:hover { text-decoration: underline; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.92em; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 0.8rem 1rem; overflow-x: auto; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  margin: 0.75rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.45rem 0.85rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-size: 0.82rem; font-weight: 600; white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
th.number, td.number { text-align: right; white-space: nowrap; padding-inline: 0.55rem; }
.badge { display: inline-block; white-space: nowrap; padding: 0 0.55em 0 0.45em; border: 1px solid currentColor;
  border-radius: 999px; font-size: 0.82rem; font-weight: 600; line-height: 1.5; }
.badge i { font-style: normal; display: inline-block; min-width: 1em; margin-right: 0.25em; text-align: center; }
.ok { color: var(--ok); } .info { color: var(--info); } .warn { color: var(--warn); }
.unknown { color: var(--unknown); } .badge.unknown { border-style: dashed; }
.fail { color: var(--fail); } .badge.fail { background: var(--fail); color: var(--card); border-color: var(--fail); }
.stacked th, .stacked th.number, .stacked td.number { white-space: normal; }
details { margin: 0.75rem 0; } summary { cursor: pointer; color: var(--accent); }
.tokens { max-width: none; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.9em; }
.tokens span { color: var(--soft); border-bottom: 2px solid var(--line); margin-right: 1px; border-radius: 3px; }
.tokens .counted { color: var(--ok); border-color: var(--ok); font-weight: 600;
  background: color-mix(in srgb, var(--ok) 13%, transparent); }
svg { display: block; max-width: 100%; height: auto; }
@media screen and (max-width: 30rem) { main { padding-inline: 0.75rem; } }
@media screen and (max-width: 56rem) {
  section { overflow-x: auto; } td { overflow-wrap: anywhere; }
  .stacked thead { display: none; }
  .stacked tr { display: block; border-bottom: 1px solid var(--line); padding: 0.4rem 0; }
  .stacked tbody tr:last-child { border-bottom: 0; }
  .stacked td, .stacked td.number { display: flex; gap: 1rem; border: 0; padding: 0.1rem 0.85rem; text-align: left;
    white-space: normal; overflow-wrap: anywhere; }
  .stacked td:empty { display: none; } .stacked td:first-child { font-weight: 600; }
  .stacked td::before { content: attr(data-name); flex: 0 0 9rem; color: var(--soft); font-size: 0.82rem;
    font-weight: 600; } }
@media print {
  :root { --ground: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #bbb; --accent: #123f87;
    --ok: #0a6b4a; --info: #123f87; --warn: #7a4a00; --unknown: #55357a; --fail: #a01810; }
  body { font-size: 10.5pt; } main { max-width: none; padding: 0; } nav { display: none; }
  .wide { overflow: visible; } tr, svg { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .badge.fail { background: none; color: var(--fail); }
  details::details-content { content-visibility: visible; block-size: auto; } }
"""
