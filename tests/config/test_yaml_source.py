"""YAML text becomes values that know where they were written; what is wrong is said with its line."""

from __future__ import annotations

import contextlib
import string
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from primus.config.source import (
    Leaf,
    dump_yaml,
    format_yaml_value,
    parse_scalar,
    read_yaml,
    strip_origins,
    substitute_variables,
)
from primus.errors import UsageError


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "exp.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E3", 2000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-7", -7),
        ("1_000", 1000),
        ("0x10", 16),
        ("null", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("off", False),
        ("[1, 2e3, a]", [1, 2000.0, "a"]),
        ("'12'", "12"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("2024-01-01", "2024-01-01"),
        ("2024-13-45", "2024-13-45"),
        ("1e", "1e"),
        ("=", "="),
        ("[1,", "[1,"),
        ("%x", "%x"),
        ("!!python/object:os.system x", "!!python/object:os.system x"),
    ],
)
def test_a_word_is_read_as_people_mean_it(text: str, value: Any) -> None:
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "exp.yaml is empty"),
        ("# only a comment\n", "exp.yaml is empty"),
        ("- a\n- b\n", "exp.yaml:1: expected keys and values, found a sequence"),
        ("word\n", "exp.yaml:1: expected keys and values, found a scalar"),
        ("a:\n\tb: 1\n", "exp.yaml:2: a tab indents this line; YAML allows only spaces"),
        ("a: 1\nb: 2\na: 3\n", "exp.yaml:3: key 'a' is given twice, first in line 1"),
        ("x:\n  a: 1\n  a: 1\n", "exp.yaml:3: key 'a' is given twice, first in line 2"),
        ("a: [1, 2\nb: 3\n", "exp.yaml:2: did not find expected ',' or ']'"),
        ("a: !!python/name:os.system\n", "exp.yaml:1: could not determine a constructor"),
        ("a: *nothing\n", "exp.yaml:1: found undefined alias"),
        ("a: &x {b: *x}\n", "exp.yaml:1: a value contains itself"),
        ("a: &x [*x]\n", "exp.yaml:1: a value contains itself"),
        ("a: ${HOME:x\n", "exp.yaml:1: '${' without '}'"),
        ("a: ${HOME\n", "exp.yaml:1: '${' is not followed by a variable name in '${HOME'"),
        ("a: b\nc: ${a-b}\n", "exp.yaml:2: '${' is not followed by a variable name in '${a-b}'"),
        ("a: 1\n---\nb: 2\n", "exp.yaml:2: a second YAML document begins here"),
        ("a: 1\nb: !!int ten\n", "exp.yaml:2: this is not a int"),
        ("a: !!bool 3\n", "exp.yaml:1: this is not a bool"),
        ("a: !!float x\n", "exp.yaml:1: this is not a float"),
        ("a: !!timestamp x\n", "exp.yaml:1: this is not a timestamp"),
        ("a: !!timestamp 2024-01-01\n", "exp.yaml:1: a value of the type !!timestamp is not supported"),
        ("a: !!binary aGk=\n", "exp.yaml:1: a value of the type !!binary is not supported"),
        ("[model]\nname = 'x'\n", "exp.yaml: this is TOML"),
        ("# c\n\n[[a.b]]\n", "exp.yaml: this is TOML"),
        ("lr = 1e-4\n", "exp.yaml: this is TOML"),
        (b"a: \xff\n", "exp.yaml: not UTF-8 text (byte 3)"),
        ("a: 1\n".encode("utf-16"), "exp.yaml: not UTF-8 text (byte 0)"),
        (b"a: \x00\n", "exp.yaml: not YAML"),
    ],
)
def test_a_wrong_file_is_one_message_with_its_line(write, text: str | bytes, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_yaml(write(text), {"HOME": "/root"})
    assert caught.value.problem.startswith(problem)


def test_a_byte_order_mark_is_no_part_of_the_first_key(write) -> None:
    assert strip_origins(read_yaml(write(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n"), {})) == {"a": 1, "b": 2}


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(UsageError, match=r"quickstrt\.yaml: no such file") as error:
        read_yaml(tmp_path / "quickstrt.yaml", {})
    assert error.value.hint == "did you mean 'quickstart.yaml'?"
    (tmp_path / ".pre-commit-config.yaml").touch()
    with pytest.raises(UsageError, match=r"other\.yaml: no such file") as error:
        read_yaml(tmp_path / "other.yaml", {})
    assert error.value.hint == "valid: quickstart.yaml"
    with pytest.raises(UsageError, match="a folder, not a file"):
        read_yaml(tmp_path, {})


def test_a_file_is_toml_by_its_name(write) -> None:
    with pytest.raises(UsageError, match=r"exp\.toml: this is TOML") as error:
        read_yaml(write("a: 1\n", "exp.toml"), {})
    assert "config import" in error.value.hint


def test_a_mapping_that_merges_another_can_be_used_twice(write) -> None:
    tree = read_yaml(write("base: &b {lr: 1}\nmid: &m\n  <<: *b\n  lr: 2\none: *m\ntwo: *m\n"), {})
    assert strip_origins(tree)["two"] == {"lr": 2}


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join(9 * ['*' + before])}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)
MAPPING_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{after}: &{after} {{p: *{before}, q: *{before}}}\n"
    for before, after in [
        (f"{chr(97 + n // 26)}{chr(97 + n % 26)}" if n else "a", f"{chr(97 + (n + 1) // 26)}{chr(97 + (n + 1) % 26)}")
        for n in range(40)
    ]
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(40))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "aliases repeat more than 100,000 values"),
        (MAPPING_BOMB, "aliases repeat more than 100,000 values"),
        (MERGE_BOMB, "aliases repeat more than 100,000 values"),
        ("".join(f"a{n}: &a{n} [*a{n - 1}]\n" if n else "a0: &a0 [x]\n" for n in range(400)), "levels of nesting"),
        ("a: " + 50_000 * "[" + 50_000 * "]", "more than 200 levels of nesting"),
        ("a: " + 50_000 * "{a: ", "more than 200 levels of nesting"),
        (50_000 * "- ", "more than 200 levels of nesting"),
        ("a: " + 20_000_000 * "x", "larger than 16 MiB"),
    ],
    ids=["lists", "mappings", "merges", "chain", "flow lists", "flow mappings", "block lists", "size"],
)
def test_a_file_that_would_exhaust_time_or_memory_is_refused(write, text: str, problem: str) -> None:
    started = time.process_time()
    with pytest.raises(UsageError, match=problem):
        read_yaml(write(text), {})
    assert time.process_time() - started < 2, "of a process that shares its cores"


@pytest.mark.parametrize(
    "text", [BOMB.replace("\n", "\n\n"), "[" * 50_000, "&a [*a]", "9" * 5000, "0x" + "f" * 5000, "!!int x"]
)
def test_a_word_that_cannot_be_a_value_stays_text(text: str) -> None:
    assert parse_scalar(text) == text


def test_an_integer_that_no_tensor_holds_stays_text(write) -> None:
    tree = read_yaml(write(f"a: {2**63 - 1}\nb: {2**63}\nc: {-(2**63)}\nd: 0x{'f' * 5000}\n"), {})
    assert strip_origins(tree) == {"a": 2**63 - 1, "b": str(2**63), "c": -(2**63), "d": "0x" + "f" * 5000}


def test_merged_keys_may_be_given_again(write) -> None:
    tree = read_yaml(write("base: &b {lr: 1, seed: 2}\nown:\n  <<: *b\n  lr: 3\n"), {})
    assert strip_origins(tree)["own"] == {"lr": 3, "seed": 2}


def test_every_value_knows_its_line(write) -> None:
    tree = read_yaml(write("a: 1\nb:\n  c: [1, {d: 2}]\n"), {})
    assert tree == {"a": Leaf(1, "exp.yaml:1", "1"), "b": {"c": Leaf([1, {"d": 2}], "exp.yaml:3")}}


@pytest.mark.parametrize(
    ("text", "value", "origin"),
    [
        ("${A}", 12, "$A"),
        ("'${A}'", "12", "$A"),
        ("${N:5}", 5, "exp.yaml:1"),
        ("${N:1e-4}", 1e-4, "exp.yaml:1"),
        ("${N:}", None, "exp.yaml:1"),
        ("${N:${A}}", 12, "$A"),
        ("${N:${M:x}-y}", "x-y", "exp.yaml:1"),
        ("${A}/${B}", "12/two", "$A, $B"),
        ("${B:${A}}", "two", "$B"),
        ("${N:a:b}", "a:b", "exp.yaml:1"),
        ("$A", "$A", "exp.yaml:1"),
        ("$${A}", "$12", "$A"),
        ("${LOOP}", "${LOOP}", "$LOOP"),
        ("${N:-5}", 5, "exp.yaml:1"),
        ("${A:-5}", 12, "$A"),
        ("${EMPTY:-x}", "x", "exp.yaml:1"),
        ("${EMPTY:x}", None, "$EMPTY"),
        ("${N:--1}", -1, "exp.yaml:1"),
        ("${N:-${M:-x}}", "x", "exp.yaml:1"),
    ],
)
def test_variables_are_replaced_once(write, text: str, value: Any, origin: str) -> None:
    environ = {"A": "12", "B": "two", "LOOP": "${LOOP}", "EMPTY": ""}
    leaf = read_yaml(write(f"k: {text}\n"), environ)["k"]
    assert isinstance(leaf, Leaf)
    assert (leaf.value, leaf.origin) == (value, origin)


def test_variables_are_replaced_inside_lists(write) -> None:
    assert strip_origins(read_yaml(write("k: [a, '${A}', '${N:3}']\n"), {"A": "x"})) == {"k": ["a", "x", "3"]}


def test_a_required_variable_that_is_not_set_is_named(write) -> None:
    with pytest.raises(UsageError) as caught:
        read_yaml(write("a: 1\nb: ${DATA}/x\n"), {})
    assert str(caught.value) == "exp.yaml:2: variable DATA is not set\n  export DATA=... or write ${DATA:default}"


def test_without_an_environment_braces_stay(write) -> None:
    assert strip_origins(read_yaml(write("k: ${A:1}\n"), None)) == {"k": "${A:1}"}


texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=10)
confusing = st.text(st.sampled_from("0123456789eE.+-_:xo~{}[]$#&*!|>'\"%@` \n\t\x85\u2028\ufeff"))


@given(st.dictionaries(st.text(string.ascii_letters, min_size=1), values | confusing))
def test_what_is_dumped_is_read_back(tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any]) -> None:
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump_yaml(value), encoding="utf-8")
    if value:
        assert strip_origins(read_yaml(file, None)) == value


@given(st.text(st.sampled_from("ab${}:_ ")))
def test_substitution_ends_and_keeps_what_is_no_variable(text: str) -> None:
    try:
        found, used = substitute_variables(text, {"a": "1"}, "here")
    except UsageError:
        return
    assert "${" in text or (found, used) == (text, [])


yaml_pieces = st.sampled_from(
    "a|b: |: |- |[|]|{|}|, |&a |*a|<<: |!!int |!!set |!!python/x |'|\"|>|? |${A:|${A:-|# |0x|1e999|~|= ".split("|")
    + "\n,\n  ,\n    ,---\n,\t,\0,\x85,|".split(",")
)


@given(st.lists(yaml_pieces, max_size=30).map("".join))
def test_any_text_is_a_mapping_or_one_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text, encoding="utf-8")
    with contextlib.suppress(UsageError):
        assert isinstance(strip_origins(read_yaml(file, {"A": "1"})), dict)


@given(texts | confusing)
def test_any_word_is_some_value(text: str) -> None:
    parse_scalar(text)


@pytest.mark.parametrize("value", [1e-05, 1.5e-07, 3e20, 0.1, 5e5, 1e16, -1e-9, True, None, 7, ""])
def test_a_formatted_value_is_the_same_in_both_versions_of_yaml(value: object) -> None:
    text = format_yaml_value(value)
    assert yaml.safe_load(text) == value  # version 1.1
    assert parse_scalar(text) == value  # numbers of version 1.2
    assert type(yaml.safe_load(text)) is type(value)
