"""A value that is known as a secret is hidden wherever it stands, in every form that text may give it."""

from __future__ import annotations

import base64
import io
import json
import shlex
import urllib.parse
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from primus import redaction
from primus.redaction import MASK, redact
from primus.redaction.known import is_distinctive

VALUES = st.text(min_size=8, max_size=60).filter(lambda value: is_distinctive(value) and value == value.strip())


@given(VALUES)
def test_no_form_of_a_known_value_survives(value: str) -> None:
    forms = {
        "plain": value,
        "JSON": json.dumps(value),
        "JSON in UTF-8": json.dumps(value, ensure_ascii=False),
        "Python": repr(value),
        "shell": shlex.quote(value),
        "URL": urllib.parse.quote(value, safe=""),
        "form": urllib.parse.quote_plus(value),
        "hexadecimal": value.encode("utf-8", "surrogateescape").hex(),
    }
    with redaction.scope():
        redaction.learn_value(value)
        for name, text in forms.items():
            shown = redact(f"before={text}=after")
            assert shown.replace('"', "").replace("'", "") == f"before={MASK}=after", name


TEXT_AROUND = st.text("ab:", max_size=5)


@given(st.text("abcXYZ019_-", min_size=9, max_size=40), TEXT_AROUND, TEXT_AROUND)
def test_a_value_in_base64_with_others_around_it_is_hidden(value: str, before: str, after: str) -> None:
    with redaction.scope():
        redaction.learn({"A_TOKEN": f"q{value}q"})
        encoded = base64.b64encode(f"{before}q{value}q{after}".encode()).decode()
        shown = redact(f"x {encoded} y")
        # Characters at either end also hold bits of what is around the value.
        assert MASK in shown and len(shown) <= len("x  y") + len(MASK) + 2 * (len(before) + len(after) + 4)


def test_a_value_inside_of_a_longer_one_does_not_end_its_mask() -> None:
    with redaction.scope():
        redaction.learn({"A_TOKEN": "begin-canary-end-of-it", "B_TOKEN": "canary-e"})
        assert redact("x begin-canary-end-of-it y canary-e") == f"x {MASK} y {MASK}"
        assert redaction.redact_log_text("canary-e, password: hunter2") == f"{MASK}, password: {MASK}"


@pytest.mark.parametrize("value", ["correct horse battery staple and some more words", "horse-horse battery-staple"])
@pytest.mark.parametrize("width", [10, 20, 80])
def test_a_value_that_yaml_folds_is_hidden(width: int, value: str) -> None:
    with redaction.scope():
        redaction.learn({"PASSPHRASE": value})
        for style in (None, '"', "'", ">"):
            shown = redact(yaml.dump({"x": value}, width=width, default_style=style))
            assert "battery" not in shown, style


def test_each_line_of_a_value_of_several_is_hidden() -> None:
    with redaction.scope():
        redaction.learn({"A_SECRET": "first-line-canary\nsecond-line-canary\n"})
        assert redact("x second-line-canary y\nfirst-line-canary") == f"x {MASK} y\n{MASK}"


@pytest.mark.parametrize(
    "value", ["1", "true", "12345", "1e-4", "dev", "train", "password", "pretrain", "a1", "/usr", "None", "20250101"]
)
def test_values_that_would_hide_ordinary_text_are_hidden_by_their_name_alone(value: str) -> None:
    with redaction.scope():
        redaction.learn({"A_TOKEN": value})
        assert redact(f"x {value} y") == f"x {value} y"
        assert redaction.redact_value("A_TOKEN", value) == MASK


def test_a_short_value_is_hidden_as_a_word() -> None:
    with redaction.scope():
        redaction.learn({"A_PIN": "hu7ter"})
        assert redact("x hu7ter, hu7ters") == f"x {MASK}, hu7ters"


@pytest.mark.parametrize(
    "value",
    [
        "https://u:canary-9@h/x",
        "https://u:canary%2D9@h",
        "Server=h;Password=canary-9;",
        "https://canary-9@h",
        "x?token=canary-9",
    ],
)
def test_what_is_secret_inside_of_a_value_is_hidden_elsewhere(value: str) -> None:
    with redaction.scope():
        redaction.learn({"ANY": value})
        assert redact("it says canary-9.") == f"it says {MASK}."


def test_what_is_learnt_is_forgotten_after_its_scope() -> None:
    with redaction.scope():
        redaction.learn({"A_TOKEN": "canary-of-a-scope"})
    assert redact("canary-of-a-scope") == "canary-of-a-scope"


def test_the_values_of_options_are_learnt_but_for_names_of_secrets_that_are_kept_elsewhere() -> None:
    args = ["--pull-secret", "registry-name", "--secret=X=some-name/some-key", "--api-key", "canary-of-args"]
    with redaction.scope():
        redaction.learn_args([*args, "--env=DB_PASS=canary-inside", "MY_TOKEN=canary-assigned"])
        assert redact("registry-name some-name/some-key") == "registry-name some-name/some-key"
        assert redact("canary-of-args canary-inside canary-assigned") == f"{MASK} {MASK} {MASK}"


def test_a_stream_and_a_file_are_redacted(tmp_path: Path) -> None:
    log, clean = tmp_path / "rank_0.log", tmp_path / "rank_1.log"
    log.write_bytes(b"\xff\xfe before canary-of-a-file after\nhf_abcdefgh12345\n")
    clean.write_bytes(b"\xff\xfe nothing\n")
    before = clean.stat().st_mtime_ns
    with redaction.scope():
        redaction.learn({"A_TOKEN": "canary-of-a-file"})
        stream = io.StringIO()
        print("x", "canary-of-a-file", file=redaction.redacting(stream))
        redaction.redact_file(log)
        redaction.redact_file(clean)
    assert stream.getvalue() == f"x {MASK}\n"
    assert log.read_bytes() == b"\xff\xfe before <secret> after\n<secret>\n"
    assert clean.stat().st_mtime_ns == before


@pytest.mark.parametrize("value", ["a7x9", "hu7te", "4071882390", "1234567890123", "abcdef"])
def test_the_shortest_values_that_are_learnt(value: str) -> None:
    with redaction.scope():
        redaction.learn({"A_TOKEN": value})
        assert redact(f"x {value} y") == f"x {MASK} y"


@pytest.mark.parametrize("value", ["a7x", "abcde", "407188239"])
def test_the_longest_values_that_are_too_ordinary_to_be_learnt(value: str) -> None:
    with redaction.scope():
        redaction.learn({"A_TOKEN": value})
        assert redact(f"x {value} y") == f"x {value} y"
