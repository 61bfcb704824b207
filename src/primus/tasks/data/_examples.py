"""Show samples of instruction data as the model sees them: each token, and whether it counts in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primus.data.instruction.inspection import SampleSegment
    from primus.data.mask_report import MaskReport
    from primus.data.training.step_samples import TrainingSample
    from primus.report.page import Html

COUNTED, OTHER, BOUNDARY = "32", "2", "4"
"""Codes of a terminal: green, dim, and underlined for every second token, so that tokens stand apart."""


def format_reports(reports: Sequence[MaskReport]) -> str:
    """What counts in each file, and what the check finds."""
    lines = []
    for each in reports:
        share = each.counted_tokens / each.tokens
        lines.append(
            f"{each.source}: {each.examples:,} examples, {each.tokens:,} tokens, of which {each.counted_tokens:,}"
            f" ({share:.1%}) count in the loss"
        )
        lines += [f"  problem: {found.problem}; {found.hint}" for found in each.problems]
        lines += [f"  note: {note}" for note in each.notes]
    return "\n".join(lines)


def format_tokens(segment: SampleSegment) -> str:
    """The tokens of a segment for a terminal, each by itself."""
    kind = COUNTED if segment.is_counted else OTHER
    return "".join(
        _paint(_show_controls(piece), f"{kind};{BOUNDARY}" if number % 2 else kind)
        for number, piece in enumerate(segment.pieces, segment.first_token)
    )


def write_page(
    output: Path,
    title: str,
    reports: Sequence[MaskReport],
    samples: Sequence[TrainingSample],
    segments: Mapping[int, list[SampleSegment]],
) -> None:
    """Write the samples as a page."""
    from primus.report import page
    from primus.runs import files

    rows = [
        (each.source, f"{each.examples:,}", f"{each.tokens:,}", f"{each.counted_tokens / each.tokens:.1%}")
        for each in reports
    ]
    found = [
        page.make_paragraph(page.Html(f"{page.make_badge(kind, word)} {page.escape(text)}"))
        for each in reports
        for kind, word, text in [
            *(("fail", "problem", f"{one.problem}; {one.hint}") for one in each.problems),
            *(("info", "note", note) for note in each.notes),
        ]
    ]
    legend = page.Html(
        '<p class="tokens"><span class="counted">counts in the loss</span> <span>does not count</span></p>'
    )
    table = page.make_table(("data", "examples", "tokens", "count in the loss"), rows, right=(1, 2, 3))
    sections: list[tuple[str, object]] = [("What counts", page.join_fragments(table, *found, legend))]
    for sample in samples:
        content = page.join_fragments(*_list_examples(segments[sample.sample], page.Html))
        sections.append((f"Sample {sample.sample:,}", content))
    files.write_text(output, page.format_page(title, sections))


def _list_examples(segments: Sequence[SampleSegment], html: type[Html]) -> list[Html]:
    from itertools import groupby

    from primus.report.page import escape, make_element

    fragments = []
    for (source, row), parts in groupby(segments, lambda each: (each.source, each.row)):
        spans = [
            make_element(
                "span",
                _show_controls(piece),
                class_="counted" if part.is_counted else "",
                title=f"token {number}: {'counts' if part.is_counted else 'does not count'}",
            )
            for part in parts
            for number, piece in enumerate(part.pieces, part.first_token)
        ]
        fragments.append(make_element("h3", f"{Path(source).name}, row {row:,}"))
        fragments.append(html(f'<p class="tokens">{"".join(map(str, spans))}</p>'))
    return [html(escape(each)) for each in fragments]


def _show_controls(piece: str) -> str:
    return piece.replace("\n", "\u21b5\n").replace("\t", "\u2192\t").replace("\x1b", "\u241b")


def _paint(text: str, codes: str) -> str:
    # By line, so that a terminal does not color the rest of it.
    return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" if line else "" for line in text.split("\n"))
