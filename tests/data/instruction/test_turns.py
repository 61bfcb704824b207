"""Which turns of a conversation count, tools, tables, blends, and templates that do not end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.data.instruction.test_instruction_data import (
    SHORTENING,
    TEMPLATE,
    converse,
    open_data,
    write_rows,
    write_tokenizer,
)

from primus.data.instruction.dataset import COUNTED, TOKENS
from primus.data.instruction.encode import ExampleEncoder, TrainOn
from primus.data.instruction.examples import parse_example, read_examples
from primus.errors import UsageError

WITH_TOOLS = (
    "{% if tools %}{% for t in tools %}[{{ t['name'] }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def mark(row: dict[str, Any], **marks: Any) -> dict[str, Any]:
    """Add a field to the first answer."""
    row["messages"][1] |= marks
    return row


def read_counted(folder: Path, row: dict[str, Any], train_on: TrainOn = "all", template: str = TEMPLATE) -> str:
    encoder = ExampleEncoder(write_tokenizer(folder / "tok", template), train_on)
    encoded = encoder.encode(parse_example(row, "row"), "row")
    return encoder.tokenizer.decode(encoded.tokens[encoded.is_counted].tolist())


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
@pytest.mark.parametrize(
    ("row", "train_on", "counted"),
    [
        (converse("q", "a", "r", "b"), "last", "b<|im_end|>"),
        (mark(converse("q", "a", "r", "b"), weight=0), "all", "b<|im_end|>"),
        (mark(converse("q", "a", "r", "b"), train=False), "all", "b<|im_end|>"),
        (mark(converse("q", "a", "r", "b"), train=True), "last", "a<|im_end|>b<|im_end|>"),
        (mark(converse("q", "a", "r", "b"), weight=1), "all", "a<|im_end|>b<|im_end|>"),
        # A prompt does not count, whoever speaks in it (trl: completion_only_loss).
        (
            {"prompt": converse("q", "a", "r")["messages"], "completion": [{"role": "assistant", "content": "b"}]},
            "all",
            "b<|im_end|>",
        ),
    ],
)
def test_turns_count_as_train_on_and_their_marks_say(
    tmp_path: Path, row: dict[str, Any], train_on: TrainOn, counted: str, template: str
) -> None:
    assert read_counted(tmp_path, row, train_on, template) == counted


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (mark(converse("q", "a"), weight=0.5), "a message counts or does not"),
        (mark(converse("q", "a"), weight=1, train=False), "a message counts or does not"),
        ({"messages": [{"role": "user", "content": "q", "train": True}, *converse("q", "a")["messages"]]}, "only the"),
        ({**converse("q", "a"), "tools": "{"}, "are not a list"),
        (mark(converse("q", "a"), tool_calls=[{"function": {"name": "f", "arguments": "no"}}]), "are not an object"),
        (mark(converse("q", "a"), tool_calls=["f"]), "invalid call of a tool"),
    ],
)
def test_marks_and_tools_of_the_wrong_kind_are_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=f"row: .*{problem}"):
        parse_example(row, "row")


def test_tools_and_calls_are_rendered_from_objects_and_from_their_text(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    as_sharegpt = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "sum", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    tools = [{"name": "sum"}]
    encoder = ExampleEncoder(write_tokenizer(tmp_path / "tok", WITH_TOOLS))
    found = [
        encoder.encode(parse_example(row, "row"), "row")
        for row in (
            {"messages": turns, "tools": tools},
            {"messages": turns, "tools": json.dumps(tools)},
            {"conversations": as_sharegpt, "tools": json.dumps(tools)},
        )
    ]
    text = encoder.tokenizer.decode(found[0].tokens.tolist())
    assert text.startswith("[sum]<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nsum({")
    counted = encoder.tokenizer.decode(found[0].tokens[found[0].is_counted].tolist())
    assert counted == 'sum({"a": 1})<|im_end|>two<|im_end|>'
    assert all(np.array_equal(each.tokens, found[0].tokens) for each in found)


def test_parquet_has_the_examples_of_jsonl(tmp_path: Path) -> None:
    """A table fills in fields that only other rows have, which must not reach the template."""
    rows = [{**mark(converse("q", "a", "r", "b"), weight=0), "tools": '[{"name": "f"}]'}, converse("s", "c")]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    given = write_rows(tmp_path / "rows.jsonl", rows)
    assert list(read_examples(str(tmp_path / "rows.parquet"))) == list(read_examples(given))
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    with pytest.raises(Exception, match=r"bad.parquet: damaged"):
        list(read_examples(str(tmp_path / "bad.parquet")))


def test_a_blend_has_the_shares_of_its_weights_and_lists_have_those_of_their_sizes(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", [{"prompt": "pp", "completion": "a"} for _ in range(30)])
    two = write_rows(tmp_path / "two.jsonl", [{"prompt": "pp", "completion": "b"} for _ in range(10)])

    def count(given: list[str | float], **settings: Any) -> int:
        train = open_data(tmp_path, [], sft_data_path=given, **settings).train
        samples = [train[number] for number in range(200)]
        return sum(int((each[TOKENS][each[COUNTED] > 0] == samples[0][TOKENS, 2]).any()) for each in samples)

    write_rows(tmp_path / "rows.jsonl", [])
    assert count([one, two]) == 150
    assert count([0.5, one, 0.5, two]) == 100
    assert count([1, one, 3, two]) == 50
    with pytest.raises(UsageError, match="a blend must be weight, prefix"):
        count([one, 0.5])


def test_answers_that_a_template_shortens_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(tmp_path / "tok", SHORTENING)
    rows = [converse("q", "long", "r", "last"), converse("q", "a"), converse("q", "one", "r", "two", "s", "three")]
    open_data(tmp_path, rows, truncation="drop", seq_length=300)
    assert "3 earlier answers do not count: the chat template shortens them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "loops take more than"),
        ("{% set s = 'ab' * 99999 %}{% for a in s %}{% for b in s %}x{% endfor %}{% endfor %}", "loops take more than"),
        ("{{ 'a' * 9999999999 }}", "makes too much"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% for %}", "is invalid"),
    ],
)
def test_a_template_that_does_not_end_or_reaches_out_is_refused(tmp_path: Path, template: str, problem: str) -> None:
    encoder = ExampleEncoder(write_tokenizer(tmp_path / "tok", template))
    with pytest.raises(UsageError, match=problem):
        encoder.encode(parse_example(converse("q", "a"), "row"), "row")
