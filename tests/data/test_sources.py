from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

from primus import registry
from primus.data.source import SOURCES
from primus.errors import PrimusError


def test_the_standard_library_is_a_few_million_characters_of_text_without_tests() -> None:
    source = registry.load_plug_in(SOURCES, "python-stdlib")
    texts = list(source.documents())
    assert 6e6 < sum(map(len, texts)) < 14e6
    assert all(texts)
    assert len(set(texts)) > 0.95 * len(texts)
    joined = "\n".join(texts)
    assert "def namedtuple(" in joined
    assert "class TestResult" in joined  # unittest itself
    assert "import unittest\nfrom test import support" not in joined
    assert texts == list(source.documents())


def test_neighbors_are_not_of_one_package() -> None:
    texts = list(registry.load_plug_in(SOURCES, "python-stdlib").documents())
    last = texts[-len(texts) // 10 :]
    codes = sum("import" in text and "def " in text for text in last) / len(last)
    assert 0.4 < codes < 0.99


def test_its_sources_are_python() -> None:
    texts = list(registry.load_plug_in(SOURCES, "python-stdlib").documents())
    checked = [text for text in texts if text.startswith(("import ", "from ", '"""'))][:20]
    assert len(checked) == 20
    for text in checked:
        assert list(tokenize.generate_tokens(io.StringIO(text).readline))


def test_a_library_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = registry.load_plug_in(SOURCES, "python-stdlib")
    monkeypatch.setattr(source.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(PrimusError, match="no sources of the standard library"):
        next(source.documents())
