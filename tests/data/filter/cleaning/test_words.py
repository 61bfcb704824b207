"""Words, against spaCy's rules, plain Python and the definition."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.data.filter.cleaning import contractions, words
from primus.errors import UsageError

DECISIONS = json.loads(Path(__file__).with_name("decisions.json").read_text())
AWKWARD = st.text(alphabet="aZé'\u2019.,-!?()[]#$%+/:@09 \n\t\u2026\u201c中\u0301\U0001f600…", max_size=60)


def _split(text: str, definition: str = "spacy-like") -> list[str]:
    batch = words.pack_texts([text])
    return [text[first:last] for first, last in words.split_words(batch, definition).spans.tolist()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, world.", "Hello|,|world|."),
        ("(don't!)", "(|do|n't|!|)"),
        ("It's they'll I'm we've cannot", "It|'s|they|'ll|I|'m|we|'ve|can|not"),
        ("It\u2019s", "It|\u2019s"),
        ("well-known 3-4 a--b", "well|-|known|3|-|4|a|--|b"),
        ("e.g. U.S. Mr. end.", "e.g.|U.S.|Mr.|end|."),
        ("wait... what?!", "wait|...|what|?|!"),
        ("5km 10% 1,000.5 $5", "5|km|10|%|1,000.5|$|5"),
        ("https://a.org/b?c=d, file.txt x@y.de", "https://a.org/b?c=d|,|file.txt|x@y.de"),
        ("one.Two three,four a/b", "one|.|Two|three|,|four|a|/|b"),
        ("\u201cquoted\u201d\u2014so no\u2014yes", "\u201c|quoted\u201d\u2014so|no|\u2014|yes"),
        ("(b): c", "(|b|):|c"),
        ("5p.m. 5pm", "5|p.m.|5|pm"),
    ],
)
def test_words_are_those_of_spacy(text: str, expected: str) -> None:
    assert _split(text) == expected.split("|")


def test_the_number_of_words_is_spacys_in_recorded_texts() -> None:
    found = words.split_words(words.pack_texts([each["text"] for each in DECISIONS]), "spacy-like")
    counts = (found.first[1:] - found.first[:-1]).tolist()
    assert counts == [each["words"] for each in DECISIONS]


@given(st.lists(AWKWARD, max_size=5), st.sampled_from(words.DEFINITIONS))
def test_words_are_all_that_is_not_space_in_order(texts: list[str], definition: str) -> None:
    found = words.split_words(words.pack_texts(texts), definition)
    for number, text in enumerate(texts):
        offset = sum(map(len, texts[:number]))
        spans = found.spans[found.first[number] : found.first[number + 1]] - offset
        parts = [text[first:last] for first, last in spans.tolist()]
        assert "".join(parts) == "".join(text.split())
        assert all(parts) and (definition == "spacy-like" or parts == text.split())


@given(st.lists(AWKWARD, min_size=1, max_size=5))
def test_equal_words_have_equal_hashes_wherever_they_are_and_others_have_others(texts: list[str]) -> None:
    batch = words.pack_texts(texts)
    found = words.split_words(batch, "whitespace")
    whole = "".join(texts)
    named = {
        (whole[first:last], value)
        for (first, last), value in zip(found.spans.tolist(), found.hash.tolist(), strict=True)
    }
    assert len(named) == len({word for word, _ in named}) == len({value for _, value in named})


def test_hashes_never_change() -> None:
    found = words.split_words(words.pack_texts(["the naïve 中"]), "whitespace")
    assert found.hash.tolist() == [12071504913606394943, 11367914084561806463, 9108393437195829926]


def test_more_words_than_there_was_room_for_are_found() -> None:
    assert len(_split("!" * 5000)) == 5000


def test_an_unknown_definition_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'whitespace'"):
        words.split_words(words.pack_texts(["a"]), "whitspace")


def test_ordinary_words_are_no_short_forms() -> None:
    assert not contractions.ORDINARY & set(contractions.build_word_lengths())
    assert contractions.build_word_lengths()["hadn't've"] == (3, 3, 3)


PLAIN = """
import sys, json
if sys.argv[1] == "plain":
    sys.modules["numba"] = None
from primus.data.filter.cleaning import recipe
from primus.data.filter.cleaning.block import DocumentBlock
from primus.data.filter.cleaning import words
texts = json.load(sys.stdin)
found = words.split_words(words.pack_texts(texts), "spacy-like")
block = DocumentBlock(list(texts))
loaded = recipe.load_recipe("fineweb")
loaded.apply(block)
removals = [[each.document, each.rule, each.reason, each.value] for each in block.removals]
print(json.dumps([found.spans.tolist(), found.hash.tolist(), found.flags.tolist(), removals, block.texts]))
"""


def test_without_numba_the_results_are_the_same() -> None:
    texts = [each["text"][:1500] for each in DECISIONS[:20]]
    results = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", PLAIN, how],
            input=json.dumps(texts),
            text=True,
            capture_output=True,
            check=True,
        ).stdout
        for how in ("plain", "compiled")
    ]
    assert results[0] == results[1]
    assert "gopher_quality" in results[0] and "gopher_repetition" in results[0]


CACHE = "from primus.data.filter.cleaning import compiler; print(compiler.NUMBA.config.CACHE_DIR)"


@pytest.mark.parametrize(
    ("writable", "expected"),
    [(("cache", "home"), "cache/primus/numba"), (("home",), "home/.cache/primus/numba"), ((), "primus-numba-")],
)
def test_what_is_compiled_is_kept_where_it_can_be_written(
    tmp_path: Path, writable: tuple[str, ...], expected: str
) -> None:
    pytest.importorskip("numba")
    for name in {"cache", "home"} - {*writable}:
        (tmp_path / name).write_text("no folder")
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    environ = {**os.environ, **own}
    environ.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", CACHE], env=environ, text=True, capture_output=True, check=True)
    assert expected in done.stdout
    assert Path(done.stdout.strip()).is_dir() == bool(writable), "a temporary folder is removed at the end"
