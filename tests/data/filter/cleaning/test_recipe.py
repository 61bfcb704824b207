from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from primus.data.filter.cleaning import recipe
from primus.data.filter.cleaning.rules import RULES, lists
from primus.data.filter.cleaning.rules.language import Language
from primus.errors import UsageError


@pytest.mark.parametrize("name", recipe.list_presets())
def test_a_preset_writes_down_every_threshold_that_is_on(name: str) -> None:
    tree = recipe.source.strip_origins(recipe._read_recipe(name)[1])
    for rule in recipe.load_recipe(name).rules:
        fields = {key: value for key, value in msgspec.to_builtins(rule).items() if value is not None}
        assert set(tree["rules"][rule.name]) == set(fields) - {"rule", "stop_words"}


def test_presets_have_the_defaults_of_their_rules_but_for_what_makes_them_theirs() -> None:
    expected = {name: RULES[name]() for name in ("gopher_repetition", "gopher_quality", "fineweb_quality")}
    loaded = {rule.name: rule for rule in recipe.load_recipe("fineweb").rules}
    assert list(loaded) == ["gopher_repetition", "gopher_quality", "c4", "fineweb_quality"]
    assert {name: loaded[name] for name in expected} == expected
    assert msgspec.structs.replace(loaded["c4"], terminal_punctuation=True) == RULES["c4"]()
    assert recipe.load_recipe("c4").rules == (RULES["c4"](),)


def test_a_file_changes_adds_and_takes_out_rules_of_what_it_extends(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "extends: fineweb\nwords: whitespace\nrules:\n  c4: off\n  gopher_quality: {min_words: 20, max_words: null}\n"
        "  gopher_repetition:\n    max_top_ngram_characters: {2: 0.5}\n  mc4:\n"
    )
    loaded = recipe.load_recipe(str(file))
    rules = {rule.name: msgspec.to_builtins(rule) for rule in loaded.rules}
    assert list(rules) == ["gopher_repetition", "gopher_quality", "fineweb_quality", "mc4"]
    assert (rules["gopher_quality"]["min_words"], rules["gopher_quality"]["max_words"]) == (20, None)
    assert rules["gopher_repetition"]["max_top_ngram_characters"] == {2: 0.5, 3: 0.18, 4: 0.16}
    assert loaded.words == "whitespace"
    assert loaded.fingerprint() != recipe.load_recipe("fineweb").fingerprint()


@pytest.mark.parametrize(
    ("content", "problem", "hint"),
    [
        ("rules:\n  gopher_qualty: {min_words: 3}\n", "mine.yaml:2: unknown rule 'gopher_qualty'", "'gopher_quality'"),
        ("rules:\n  c4:\n    min_sentence: 3\n", "mine.yaml:3: rule 'c4' has no threshold", "'min_sentences'"),
        ("rules:\n  c4:\n    min_sentences: x\n", "mine.yaml:3: rule 'c4' min_sentences: Expected `int | null`", ""),
        ("rules:\n  c4: 3\n", "mine.yaml:2: rule 'c4' has thresholds", "below"),
        ("rule:\n  c4:\n", "mine.yaml:1: unknown key 'rule'", "'rules'"),
        ("words: spacy\nrules:\n  c4:\n", "mine.yaml:1: words 'spacy'", "'spacy-like'"),
        ("words: whitespace\n", "mine.yaml: no rules", "gopher_quality"),
        ("extends: gofer\n", "no recipe 'gofer'", "gopher"),
        ("extends: mine.yaml\n", "mine.yaml: it extends itself", "another"),
        ("extends: [c4]\n", "mine.yaml:1: not the name of a recipe", "fineweb"),
        ("rules:\n  bad_words:\n", "missing required field `file`", ""),
    ],
)
def test_a_mistake_is_named_with_its_line_and_the_nearest_name(
    content: str, problem: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(content)
    with pytest.raises(UsageError) as raised:
        recipe.load_recipe("mine.yaml")
    assert problem in raised.value.problem
    assert hint in raised.value.hint


def test_an_extra_rule_comes_first_and_in_the_place_of_its_namesake(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("rules:\n  c4:\n  language: {language: de}\n")
    rules = recipe.load_recipe(str(file), [Language(language="en")]).rules
    assert [rule.name for rule in rules] == ["language", "c4"]
    assert rules[0] == Language(language="en")


def test_the_content_of_a_list_belongs_to_the_fingerprint(tmp_path: Path) -> None:
    words, file = tmp_path / "words", tmp_path / "mine.yaml"
    file.write_text(f"rules:\n  bad_words: {{file: {words}}}\n")
    seen = set()
    for content in ("one", "two"):
        words.write_text(content)
        lists._read_entries.cache_clear()
        seen.add(recipe.load_recipe(str(file)).fingerprint())
    assert len(seen) == 2
