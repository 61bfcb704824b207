from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from primus.data.filter.cleaning import words
from primus.data.filter.dedup.keys import compute_document_keys
from primus.data.filter.dedup.normalized_words import hash_words
from primus.data.filter.dedup.recipe import DedupRecipe

OFTEN = (
    "aZ \u00df\u0130é\u0301\u0e33 \u00a0\u3000.,:;-'\u2019\"09"
    "\u0663\u0968\u066b\u2396\u4e2d\ufb01\U0001d7d8\U0001f600\n\t\x00\u212b"
)
texts = st.lists(st.text(st.one_of(st.sampled_from(OFTEN), st.characters(exclude_categories=["Cs"])), max_size=40))


def hashes_of(text: str) -> list[int]:
    return [int(value) for value in hash_words([text.encode()])[0]]


@given(texts)
def test_words_are_those_of_the_simplified_text(some: list[str]) -> None:
    hashes, firsts = hash_words([text.encode() for text in some])
    reference = words.split_words(words.pack_texts(list(map(_simplified, some))), "whitespace")
    assert hashes.tolist() == reference.hash.tolist()
    assert firsts.tolist() == reference.first.tolist()


def _simplified(text: str) -> str:
    """The definition in plain words: numbers to 0, punctuation to spaces, each character small and without marks."""
    text = "".join("0" if unicodedata.category(each) == "Nd" else each for each in text)
    text = re.sub("0+([.,\u060c\u066b\u2396-\u2398]0+)?", "0", text)
    blank = "".join(" " if _is_blank(each) else each for each in text)
    parts = [unicodedata.normalize("NFD", each.lower()) for each in " ".join(blank.split())]
    return "".join(each for each in "".join(parts) if unicodedata.category(each) != "Mn")


def _is_blank(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] == "P" or category == "Cc" or (character.isascii() and category[0] == "S")


def test_case_accents_punctuation_spacing_and_numbers_make_no_difference() -> None:
    assert hashes_of("The  caf\u00e9, in 1,984...") == hashes_of("the cafe\u0301\nIN 7")
    assert len(hashes_of("The cafe in 7")) == 4
    assert hashes_of("the cafe") != hashes_of("the cage")
    assert hashes_of("!? ...") == []


def test_numbers_are_compared_where_they_are_not_to_be_normalized() -> None:
    def hashed(text: str) -> list[int]:
        return [int(value) for value in hash_words([text.encode()], normalize_numbers=False)[0]]

    assert hashed("w1 7") != hashed("w2 7")
    assert hashed("w1 7") != hashed("w1 8")
    assert hashed("w1 7") == hashed("W1, 7")
    assert hashed("no number") == [int(value) for value in hash_words([b"no number"])[0]]


def test_a_text_of_many_short_words_has_room() -> None:
    assert len(hashes_of("a " * 10_000)) == 10_000


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from primus.data.filter.dedup.keys import compute_document_keys
from primus.data.filter.dedup.recipe import DedupRecipe
print(compute_document_keys(sys.argv[1:], DedupRecipe()).tolist())
"""


def test_without_numba_the_keys_are_the_same() -> None:
    texts = ["Some na\u00efve words, 1,024 of them \u2014 or more", "short one", "?!"]
    command = [sys.executable, "-W", "error", "-c", WITHOUT_NUMBA, *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == compute_document_keys(texts, DedupRecipe()).tolist()
