"""Each rule at its threshold's edge, and its counts against plain Python that follows the papers."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data.filter.cleaning.block import DocumentBlock
from primus.data.filter.cleaning.rules import RULES
from primus.data.filter.cleaning.rules.c4 import C4, POLICY
from primus.data.filter.cleaning.rules.language import Language
from primus.data.filter.cleaning.rules.lists import BadWords, Urls
from primus.data.filter.cleaning.rules.quality import FinewebQuality, GopherQuality, Length, LongLines
from primus.data.filter.cleaning.rules.repetition import (
    DUPLICATE_NGRAMS,
    TOP_NGRAMS,
    GopherRepetition,
    count_ngram_characters,
)
from primus.data.filter.cleaning.rules.rule import Rule
from primus.data.filter.cleaning.rules.unicode_repair import UnicodeRepair
from primus.errors import UsageError

DECISIONS = json.loads(Path(__file__).with_name("decisions.json").read_text())
"""Texts of ours, and what datatrove 0.10.1 with spaCy 3.8 decides with its default thresholds."""

OFF: dict[type[Rule], dict[str, Any]] = {
    GopherQuality: {name: None for name in GopherQuality.__struct_fields__ if name != "stop_words"},
    GopherRepetition: {
        **dict.fromkeys(GopherRepetition.__struct_fields__),
        "max_top_ngram_characters": {},
        "max_duplicate_ngram_characters": {},
    },
    FinewebQuality: {name: None for name in FinewebQuality.__struct_fields__ if name != "short_line_characters"},
    Length: dict.fromkeys(Length.__struct_fields__),
}

LINES = st.lists(st.lists(st.sampled_from(["", "a", "bb", "the", "of", "c.", "-", "#", "..."]), max_size=6), max_size=8)
TEXTS = LINES.flatmap(
    lambda lines: st.sampled_from(["\n", "\n\n", "\n \n"]).map(lambda cut: cut.join(" ".join(line) for line in lines))
)
WORDS = st.lists(st.sampled_from("a bb ccc d".split()), min_size=1, max_size=60).map(" ".join)


def removed(rule: Rule, text: str, words: str = "whitespace", **fields: Any) -> tuple[str, float | str] | None:
    """Reason and value for which a rule removes a text, between others that it must not be mixed up with."""
    texts = ["one two three", text, "one two three"]
    block = DocumentBlock(texts, words, [None, fields, None])
    rule.apply(block)
    [*found] = (each for each in block.removals if each.document == 1)
    assert block.alive[1] == (not found)
    return (found[0].reason, found[0].value) if found else None


def only(kind: type[Rule], **thresholds: Any) -> Rule:
    """A rule of which nothing else is on."""
    return kind(**{**OFF[kind], **thresholds})


@pytest.mark.parametrize("number", range(len(DECISIONS)))
def test_decisions_are_those_of_datatrove(number: int) -> None:
    each = DECISIONS[number]
    for name, decision in each["decisions"].items():
        block = DocumentBlock([each["text"]])
        RULES[name]().apply(block)
        reasons = [removal.reason for removal in block.removals]
        assert (not reasons) == (decision is True), (name, decision, block.removals)
        if reasons and decision in SAME:
            assert reasons == [SAME[decision]]
        if name == "c4" and decision is True:
            assert block.texts == [each["c4_text"]]


SAME = {
    "gopher_below_alpha_threshold": "min_alphabetic_words",
    "gopher_enough_stop_words": "min_stop_words",
    "gopher_too_many_bullets": "max_bullet_lines",
    "gopher_too_many_ellipsis": "max_ellipses_per_word",
    "top_3_gram": "max_top_3gram_characters",
    "duplicated_5_n_grams": "max_duplicate_5gram_characters",
    "dup_line_frac": "max_duplicate_lines",
    "line_punct_ratio": "min_ended_lines",
    "char_dup_ratio": "max_duplicate_line_characters",
    "too_few_sentences": "min_sentences",
    "lorem_ipsum": "lorem_ipsum",
}
"""Reasons by datatrove's names and by ours."""


LINE_CHARACTERS = only(GopherRepetition, max_duplicate_line_characters=0.25)
PARAGRAPH_CHARACTERS = only(GopherRepetition, max_duplicate_paragraph_characters=0.25)
TOP_PAIRS = only(GopherRepetition, max_top_ngram_characters={2: 0.6})
REPEATED_PAIRS = only(GopherRepetition, max_duplicate_ngram_characters={2: 0.2})
SHORT_LINES = only(FinewebQuality, max_short_lines=0.5, short_line_characters=2)
EQUAL_LINES = only(FinewebQuality, max_duplicate_line_characters=0.5)


@pytest.mark.parametrize(
    ("rule", "kept", "text", "reason"),
    [  # a rule, a text that it just keeps, one that it just does not, and why
        (only(Length, min_characters=5), "abcde", "abcd", "min_characters"),
        (only(Length, max_characters=5), "abcde", "abcdef", "max_characters"),
        (only(Length, min_words=3), "a b c", "a b", "min_words"),
        (only(Length, max_words=3), "a b c", "a b c d", "max_words"),
        (only(GopherQuality, min_words=3), "a b c !", "a b ! !", "min_words"),
        (only(GopherQuality, max_words=3), "a b c !", "a b c d", "max_words"),
        (only(GopherQuality, min_mean_word_length=3), "aa bbbb", "aa bbb", "min_mean_word_length"),
        (only(GopherQuality, max_mean_word_length=3), "aa bbbb", "aa bbbbb", "max_mean_word_length"),
        (only(GopherQuality, max_hashes_per_word=0.5), "a # b c #", "a # b ##", "max_hashes_per_word"),
        (only(GopherQuality, max_ellipses_per_word=0.5), "a... b", "a... b\u2026", "max_ellipses_per_word"),
        (only(GopherQuality, max_bullet_lines=0.5), "- a\nb", " - a\n\u2022 b\nc", "max_bullet_lines"),
        (only(GopherQuality, max_ellipsis_lines=0.5), "a...\nb", "a... \nb\u2026\nc", "max_ellipsis_lines"),
        (only(GopherQuality, min_alphabetic_words=0.5), "a 1", "a 1 2", "min_alphabetic_words"),
        (only(GopherQuality, min_stop_words=2), "the of", "the the The", "min_stop_words"),
        (only(GopherRepetition, max_duplicate_lines=0.5), "a\na", "a\na\na", "max_duplicate_lines"),
        (LINE_CHARACTERS, "ab\nab\n\n\n", "ab\nab\n\n", "max_duplicate_line_characters"),
        (only(GopherRepetition, max_duplicate_paragraphs=0.5), "a\n\na", "a\n\n\na\n\na", "max_duplicate_paragraphs"),
        (PARAGRAPH_CHARACTERS, "ab\n\nab  ", "ab\n\nab ", "max_duplicate_paragraph_characters"),
        (TOP_PAIRS, "a b a b cc", "a b a b c", "max_top_2gram_characters"),
        (REPEATED_PAIRS, "a b a b ccc", "a b a b c", "max_duplicate_2gram_characters"),
        (only(FinewebQuality, min_ended_lines=0.5), "a.\nb\n\n", "a.\nb\nc", "min_ended_lines"),
        (SHORT_LINES, "ab\nabc", "ab\nab\nabc", "max_short_lines"),
        (EQUAL_LINES, "ab\nab\n\n", "ab\nab\nab", "max_duplicate_line_characters"),
        (only(FinewebQuality, max_newlines_per_word=0.5), "a b\nc d\n", "a\nb", "max_newlines_per_word"),
        (LongLines(min_long_lines=2, long_line_characters=3), "abc\nabcd", "abc\nab", "min_long_lines"),
        (C4(min_sentences=2), "Aa bb cc. Dd ee ff.", "Aa bb cc dd ee ff.", "min_sentences"),
        (C4(min_sentences=None), "a b lorem\nipsum.", "a b Lorem Ipsum.", "lorem_ipsum"),
        (C4(min_sentences=None), "a b {c} d", "a b {c} d.", "curly_bracket"),
    ],
)  # fmt: skip
def test_a_threshold_divides_at_its_edge(rule: Rule, kept: str, text: str, reason: str) -> None:
    words = "spacy-like" if isinstance(rule, C4) else "whitespace"
    assert removed(rule, kept, words) is None
    found = removed(rule, text, words)
    if (rule.name, reason) == ("fineweb_quality", "max_newlines_per_word"):
        assert found is None  # one newline for two words is just allowed
        found = removed(rule, text + "\n", words)
    assert found and found[0] == reason


@given(TEXTS)
def test_repetition_is_counted_as_in_the_paper(text: str) -> None:
    if not text:
        return
    paragraphs, lines = re.split("\n{2,}", text.strip()), re.split("\n+", text)
    for what, pieces in (("paragraphs", paragraphs), ("lines", lines)):
        repeated = [piece for number, piece in enumerate(pieces) if piece in pieces[:number]]
        assert _value(GopherRepetition, f"max_duplicate_{what}", text) == pytest.approx(len(repeated) / len(pieces))
        share = sum(map(len, repeated)) / len(text)
        assert _value(GopherRepetition, f"max_duplicate_{what[:-1]}_characters", text) == pytest.approx(share)


@settings(max_examples=150)
@given(WORDS | TEXTS.filter(bool))
def test_runs_of_words_are_counted_as_in_the_paper(text: str) -> None:
    words = text.split()
    block = DocumentBlock([text], "whitespace")
    ns, ms = sorted(TOP_NGRAMS), sorted(DUPLICATE_NGRAMS)
    counts = count_ngram_characters(block, ns, ms, [float("inf")] * (len(ns) + len(ms)))[0].tolist()
    assert counts == [*(_top(words, n) for n in ns), *(_duplicate(words, n) for n in ms)]
    assert count_ngram_characters(block, [], [2, 3], [9, 9])[0].tolist() == [_duplicate(words, 2), _duplicate(words, 3)]


def _top(words: list[str], n: int) -> int:
    runs = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    [(run, count)] = Counter(runs).most_common(1) or [("", 0)]
    return len(run) * count


def _duplicate(words: list[str], n: int) -> int:
    seen, characters, i = set(), 0, 0
    while i <= len(words) - n:
        run = tuple(words[i : i + n])
        characters += sum(map(len, run)) if run in seen else 0
        i += n if run in seen else 1
        seen.add(run)
    return characters


@given(TEXTS)
def test_gopher_quality_is_counted_as_in_the_paper(text: str) -> None:
    words, lines = text.split(), text.splitlines()
    real = [word for word in words if re.search(r"[^#.\-]", word)]
    for name, expected in {
        "max_hashes_per_word": _share(text.count("#"), words),
        "max_ellipses_per_word": _share(text.count("..."), words),
        "max_bullet_lines": _share(sum(line.lstrip().startswith("-") for line in lines), lines),
        "max_ellipsis_lines": _share(sum(line.rstrip().endswith("...") for line in lines), lines),
        "max_mean_word_length": _share(sum(map(len, real)), real),
        "max_words": len(real),
    }.items():
        assert _value(GopherQuality, name, text) == pytest.approx(expected), name


@pytest.mark.parametrize("cut", "\n|\v|\f|\r|\r\n|\x1c|\x1d|\x1e|\x1f|\t|\x85|\u2027|\u2028|\u2029".split("|"))
def test_a_line_ends_where_it_does_for_python_at_any_place(cut: str) -> None:
    for before in range(20):
        text = "x" * before + cut + "- a b c d e f g"
        share = _share(sum(line.lstrip().startswith("-") for line in text.splitlines()), text.splitlines())
        assert (removed(only(GopherQuality, max_bullet_lines=0.0), text) is not None) == (share > 0)


@given(TEXTS)
def test_fineweb_quality_is_counted_as_in_its_code(text: str) -> None:
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        assert removed(FinewebQuality(), text) == ("empty", 0)
        return
    repeated = sum(len(line) for number, line in enumerate(lines) if line in lines[:number])
    for name, expected in {
        "max_short_lines": _share(sum(len(line) <= 3 for line in lines), lines),
        "max_duplicate_line_characters": repeated / len(text.replace("\n", "")),
        "max_newlines_per_word": _share(text.count("\n"), text.split()),
    }.items():
        assert _value(FinewebQuality, name, text, short_line_characters=3) == pytest.approx(expected), name


def _share(part: int, whole: list[str]) -> float:
    return part / len(whole) if whole else 0


def _value(kind: type[Rule], name: str, text: str, **thresholds: Any) -> float:
    """What a rule has measured, from the reason of a threshold that nothing meets."""
    found = removed(only(kind, **thresholds, **{name: -1}), text)
    assert found and found[0] == name
    return float(found[1])


C4_LINES = st.lists(
    st.sampled_from(
        ["A b c.", "a b c", "a b.", "He said a \u201cb\u201d. Then he left!", 'x y "z"', "a b c...", "  a b c?  ", "",
         "Enable JavaScript to go on.", "We have a privacy policy here.", "a b[1] c.[edit]", "[2] a b c.",
         "a" * 12 + " b c."]
    ),
    max_size=8,
)  # fmt: skip


@given(C4_LINES, st.sampled_from(["\n", "\r\n", "\u2028"]), st.booleans())
def test_lines_are_dropped_as_for_c4(lines: list[str], cut: str, terminal: bool) -> None:
    block = DocumentBlock([cut.join(lines)])
    C4(min_sentences=None, max_word_length=10, terminal_punctuation=terminal).apply(block)
    kept = []
    for line in (line.strip() for line in lines):
        shown = re.sub(r"\[\d*]|\[edit]|\[citation needed]", "", line)
        ends = shown.endswith((".", "?", "!", '"', "'")) and not shown.endswith("...")
        told = "javascript" in shown.lower() or "privacy policy" in shown
        if len(line.split()) >= 3 and max(map(len, line.split())) <= 10 and (ends or not terminal) and not told:
            kept.append(shown)
    assert block.texts == ["\n".join(kept).strip()]


@pytest.mark.parametrize("phrase", [*POLICY, "javascript"])
def test_a_phrase_drops_its_line_wherever_it_is_in_any_case(phrase: str) -> None:
    for line in (
        f"{phrase} aa bb.",
        f"aa bb {phrase}.",
        f"aa bb {phrase.upper()} \u4e2d.",
        f"pp lu us {phrase.title()}",
    ):
        block = DocumentBlock([line])
        C4(min_sentences=None, terminal_punctuation=False).apply(block)
        assert block.texts == [""]
    near = DocumentBlock([f"aa bb {phrase[:-1]}~ {phrase[0]}.", f"aa bb {phrase[:2]}"])
    C4(min_sentences=None, terminal_punctuation=False).apply(near)
    assert "".join(near.texts).count("aa bb") == 2


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Aa bb cc. .", 1),
        ("Aa bb cc.  .", 2),
        ("Aa bb cc?! Dd ee ff.", 2),
        ('Aa bb cc." Dd ee ff.', 2),
        ("Aa bb ... cc dd.", 1),
        ("Aa bb cc.\nDd ee ff.", 2),
    ],
)
def test_sentences_are_those_of_spacys_sentencizer(text: str, sentences: int) -> None:
    assert removed(C4(min_sentences=10), text, "spacy-like") == ("min_sentences", sentences)


def test_dropped_lines_are_counted_by_reason() -> None:
    block = DocumentBlock(["A b c.\na b c\na b.\nEnable JavaScript here.", "nothing changes here."])
    C4(min_sentences=None).apply(block)
    assert block.edits == {
        "c4.lines_dropped.no_terminal_punctuation": 1,
        "c4.lines_dropped.few_words": 1,
        "c4.lines_dropped.javascript": 1,
        "c4.changed_documents": 1,
    }


@settings(max_examples=60)
@given(st.text(alphabet="aé\u2019&;<lt>\r\n\t\ufb01\x1b\u00c3\u00a9\u2028 ", max_size=40))
def test_repaired_text_is_what_ftfy_makes_of_it(text: str) -> None:
    ftfy = pytest.importorskip("ftfy")
    block = DocumentBlock([text])
    UnicodeRepair().apply(block)
    assert block.texts == [ftfy.fix_text(text)]


def test_a_text_in_another_language_is_removed_with_its_share() -> None:
    pytest.importorskip("pycld2")
    english = "This is a plain English sentence about rivers and stones. " * 3
    german = "Das ist ein einfacher deutscher Satz \u00fcber Fl\u00fcsse und Steine. " * 3
    assert removed(Language(), english + "\x00\x07") is None
    assert removed(Language(), german) == ("min_share", 0.0)
    with pytest.raises(UsageError, match="does not know 'xx'"):
        Language(language="xx").start()


def test_words_of_a_list_are_found_whole_in_any_case(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("# comment\nbad\nvery bad\nc++\n")
    rule = BadWords(file=str(file))
    assert removed(rule, "badly done, forbad.") is None
    assert removed(rule, "That is VERY BAD!") == ("word", "very bad")
    assert removed(rule, "written in C++.") == ("word", "c++")
    with pytest.raises(UsageError, match="cannot be read"):
        BadWords(file=str(tmp_path / "none")).start()


def test_urls_are_judged_by_domain_address_and_word(tmp_path: Path) -> None:
    for name, content in {"domains": "bad.org\n", "addresses": "http://a.org/x\n", "words": "casino\n"}.items():
        (tmp_path / name).write_text(content)
    rule = Urls(**{name: str(tmp_path / name) for name in ("domains", "addresses", "words")})
    assert removed(rule, "t", url="https://www.bad.org/a") == ("domain", "bad.org")
    assert removed(rule, "t", url="https://notbad.org/casinos") is None
    assert removed(rule, "t", url="http://A.org/x") == ("address", "http://A.org/x")
    assert removed(rule, "t", url="http://b.org/the-Casino") == ("word", "casino")
    assert removed(rule, "t", url=None) is None
    with pytest.raises(UsageError, match="no list"):
        Urls().start()
