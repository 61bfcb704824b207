"""The page frame: everything foreign is escaped, nothing is loaded, statuses read without colors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import browser
from primus.preflight.findings.finding import ORDER
from primus.report import page

HOSTILE = "<script>alert('x')</script> & \"quoted\""


def some_page() -> str:
    rows = [[f"GPU {i}", page.make_badge(status), HOSTILE, str(i)] for i, status in enumerate(ORDER)]
    content = page.join_fragments(
        page.make_paragraph(HOSTILE), page.make_table(["device", "status", HOSTILE, "n"], rows, right=(3,))
    )
    sections = [("Summary", content), (HOSTILE, HOSTILE), ("More", page.make_details("log", HOSTILE)), ("Last", "end")]
    return page.format_page(f"Report {HOSTILE}", sections, subtitle=HOSTILE)


def test_text_from_outside_is_escaped_wherever_it_enters() -> None:
    text = some_page()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 19


def test_markup_is_kept_and_not_escaped_twice() -> None:
    assert page.escape(page.escape("a & b")) == "a &amp; b"
    assert page.make_element("td", page.make_badge("ok"), class_='a"b').startswith(
        '<td class="a&quot;b"><span class="badge ok">'
    )


@pytest.mark.parametrize("status", ORDER)
def test_a_badge_has_its_word_and_a_sign_of_its_own(status: str) -> None:
    plain = re.sub("<[^>]+>", " ", page.make_badge(status)).split()
    assert plain == [page.SIGNS[status], status]
    assert len(set(page.SIGNS.values())) == len(ORDER)


def test_a_table_without_a_header_has_none() -> None:
    assert "<th" not in page.make_table(("", ""), [("a", "b")])
    assert "<thead><tr><th>a</th>" in page.make_table(("a", ""), [("a", "b")])
    wide = page.make_table(("a", 'b"c', "d", "e", "f"), [range(5)])
    assert '<td data-name="b&quot;c">1</td>' in wide, "a narrow screen shows the name of the column in each cell"


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    assert not re.search(r"https?://|src=|url\(|@import|<script|<link", some_page())


def test_the_same_values_give_the_same_page() -> None:
    assert some_page() == some_page()


def test_a_long_page_begins_with_links_to_its_sections() -> None:
    text = some_page()
    targets = re.findall(r'<a href="#([^"]+)"', text)
    assert len(targets) == 4
    assert all(f'id="{target}"' in text for target in targets)
    assert "<nav>" not in page.format_page("short", [("one", "x")])


def test_a_browser_shows_title_and_badges_in_light_and_in_dark(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(some_page())
    shown = browser.dom(file)
    assert "<title>Report &lt;script&gt;" in shown
    assert 'class="badge fail"' in shown
    light = browser.screenshot(file, tmp_path / "light.png").read_bytes()
    dark = browser.screenshot(file, tmp_path / "dark.png", is_dark=True).read_bytes()
    assert min(len(light), len(dark)) > 10_000
    assert light != dark
