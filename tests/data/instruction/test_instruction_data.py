"""Instruction data: forms of examples, the tokens that count, packing, and the order of samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from primus.config.schema import DataConfig
from primus.data.instruction import row_check
from primus.data.instruction.dataset import COUNTED, EXAMPLE, TOKENS, InstructionDataset, open_instruction_datasets
from primus.data.instruction.encode import ExampleEncoder
from primus.data.instruction.examples import parse_example, read_examples
from primus.data.instruction.inspection import list_segments
from primus.data.instruction.row_check import check_rows
from primus.errors import UsageError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORTENING = TEMPLATE.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'][:1] }}"
)
"""Shortens earlier answers, as templates do that remove the thoughts of earlier turns."""


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> str:
    """A byte-level tokenizer of 258 ids; two are the marks of messages."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def converse(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]}


def read_counted(encoder: ExampleEncoder, row: dict[str, Any]) -> str:
    """The text whose prediction counts."""
    encoded = encoder.encode(parse_example(row, "row"), "row")
    return encoder.tokenizer.exact.decode(encoded.tokens[encoded.is_counted].tolist())


@pytest.mark.parametrize(
    ("row", "counted"),
    [
        (converse("1+1?", "2", "2+2?", "4"), "2<|im_end|>4<|im_end|>"),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "a<|im_end|>",
        ),
        ({"conversations": [{"role": "user", "content": "q"}, {"from": "bard", "value": "b"}]}, "b<|im_end|>"),
        ({"prompt": "a b", "completion": " c"}, " c<|im_end|>"),
        (
            {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "r"}]},
            "r<|im_end|>",
        ),
        ({"instruction": "Say hi", "input": "", "output": "hi"}, "hi<|im_end|>"),
        ({"context": "c", "question": "q", "answers": {"text": ["x", "y"]}}, " x<|im_end|>"),
    ],
)
def test_only_answers_and_their_end_count(tmp_path: Path, row: dict[str, Any], counted: str) -> None:
    assert read_counted(ExampleEncoder(write_tokenizer(tmp_path / "tok")), row) == counted


def test_a_template_that_shortens_earlier_answers_counts_the_last_one(tmp_path: Path) -> None:
    encoder = ExampleEncoder(write_tokenizer(tmp_path / "tok", SHORTENING))
    assert read_counted(encoder, converse("q", "long", "r", "last")) == "last<|im_end|>"


@pytest.mark.parametrize(
    ("ending", "counted"),
    [
        ("<|im_end|>  \n\n", "a \n<|im_end|>"),  # the answer's own white space counts
        ("<|im_end|>", "a \n<|im_end|>"),
        ("\n\n", "a \n\n\n"),  # no token ends the answer: the newlines do
        ("<|im_end|>.\n", "a \n<|im_end|>.\n"),
    ],
)
def test_white_space_behind_the_token_that_ends_an_answer_does_not_count(
    tmp_path: Path, ending: str, counted: str
) -> None:
    template = TEMPLATE.replace("<|im_end|>\n", ending)
    row = converse("q", "a \n", "r", "")
    row["messages"] = row["messages"][:2]
    encoder = ExampleEncoder(write_tokenizer(tmp_path / "tok", template))
    assert read_counted(encoder, row) == counted
    tokens = encoder.encode(parse_example(row, "row"), "row").tokens.tolist()
    assert encoder.tokenizer.decode(tokens) == f"<|im_start|>user\nq{ending}<|im_start|>assistant\na \n{ending}"


def test_what_a_template_marks_as_generated_counts_and_nothing_else(tmp_path: Path) -> None:
    marked = TEMPLATE.replace(
        "{{ m['content'] }}<|im_end|>\n",
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>\n"
        "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}",
    )
    row = converse("1+1?", "2", "2+2?", "4")
    encoder = ExampleEncoder(write_tokenizer(tmp_path / "marked", marked))
    assert read_counted(encoder, row) == "24"
    plain = ExampleEncoder(write_tokenizer(tmp_path / "plain"))
    assert np.array_equal(
        encoder.encode(parse_example(row, "row"), "row").tokens, plain.encode(parse_example(row, "row"), "row").tokens
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "a row must be an object"),
        ('{"text": "x"}', "unknown form of an example .columns: text."),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message of the assistant"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "invalid message"),
        ('{"conversations": [{"from": "cat", "value": "x"}]}', "invalid turn .* 'cat'"),
        ('{"conversations": [{"from": "gpt", "value": null}]}', "invalid turn"),
        ('{"conversations": {"from": "gpt"}}', "conversations must be a list of turns"),
        ('{"conversations": [{"from": "human", "value": "x"}]}', "no message of the assistant"),
        ('{"prompt": 1, "completion": "x"}', "prompt and completion must be texts"),
        ('{"question": "q", "answers": []}', "needs a question and answers"),
    ],
)
def test_a_damaged_row_is_refused_with_its_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    with pytest.raises(UsageError, match=f"rows.jsonl:2: {problem}"):
        list(read_examples(str(path)))


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    encoder = ExampleEncoder(write_tokenizer(tmp_path / "tok", None))
    with pytest.raises(UsageError, match="has no chat template"):
        encoder.encode(parse_example(converse("q", "a"), "row"), "row")


def open_data(tmp_path: Path, rows: list[Any], **settings: Any) -> Any:
    if not (tmp_path / "tok").exists():
        write_tokenizer(tmp_path / "tok")
    given = {"split": "100,0,0", "data_path": str(tmp_path / "data"), "tokenizer_model": str(tmp_path / "tok")}
    given["sft_data_path"] = write_rows(tmp_path / "rows.jsonl", rows)
    length = settings.pop("seq_length", 31)
    return open_instruction_datasets(DataConfig(**given | settings), vocab_size=300, seq_length=length, seed=1)


def test_packing_keeps_each_example_once_and_whole(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * (number % 7), "completion": f" answer {number}"} for number in range(40)]
    train = open_data(tmp_path, rows, packed_sequence=True).train
    encoder, found = ExampleEncoder(str(tmp_path / "tok")), []
    for index in range(train.samples_per_epoch):
        sample = train[index]
        assert sample.shape == (3, 32)
        for number in range(1, sample[EXAMPLE].max() + 1):
            part = sample[:, sample[EXAMPLE] == number]
            assert part[COUNTED, 0] == 0, "no prediction reaches from one example into the next"
            found.append(encoder.tokenizer.exact.decode(part[TOKENS].tolist()))
        assert not sample[COUNTED][sample[EXAMPLE] == 0].any(), "padding does not count"
    assert train.samples_per_epoch < len(rows) * 0.8
    assert sorted(found) == sorted(f"{row['prompt']}{row['completion']}<|im_end|>" for row in rows)


def test_samples_are_the_same_for_each_process_and_differ_by_epoch(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": str(number)} for number in range(50)]
    first, second = open_data(tmp_path, rows), open_data(tmp_path, rows)
    order = [first.train[index][TOKENS].tobytes() for index in range(100)]
    assert order == [second.train[index][TOKENS].tobytes() for index in range(100)]
    assert set(order[:50]) == set(order[50:])
    assert order[:50] != order[50:]
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != open_data(tmp_path, rows[:-1]).fingerprint


def test_long_examples_are_refused_unless_a_policy_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "p" * 60, "completion": "x"},
        {"prompt": "p" * 10, "completion": "y" * 60},
        {"prompt": "pppp", "completion": "zz"},
    ]
    with pytest.raises(UsageError, match="2 of 3 answers do not fit into seq_length 31") as caught:
        open_data(tmp_path, rows)
    assert "truncation: drop, right or left" in caught.value.hint
    whole, end = [0] * 4 + [1] * 3 + [0] * 25, [0] * 10 + [1] * 22
    for truncation, kept, said in (
        ("drop", [whole], "2 examples are dropped, 0 are cut"),
        ("right", [whole, end], "1 examples are dropped, 1 are cut"),
        # Of the second, nothing predicts the first token that is left.
        ("left", [whole, [0] * 30 + [1] * 2, [0] + [1] * 31], "0 examples are dropped, 1 are cut"),
    ):
        train = open_data(tmp_path, rows, truncation=truncation).train
        found = [train[number][COUNTED].tolist() for number in range(train.samples_per_epoch)]
        assert sorted(found) == sorted(kept)
        assert said in capsys.readouterr().out
    with pytest.raises(UsageError, match="no example has an answer within 32 tokens"):
        open_data(tmp_path, rows[:1], truncation="right")


def test_validation_is_a_split_or_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": str(number)} for number in range(10)]
    split = open_data(tmp_path, rows, split="80,20,0")
    assert (split.train.samples_per_epoch, split.valid.samples_per_epoch, split.test) == (8, 2, None)
    other = write_rows(tmp_path / "valid.jsonl", rows[:3])
    own = open_data(tmp_path, rows, sft_valid_data_path=other)
    assert (own.train.samples_per_epoch, own.valid.samples_per_epoch) == (10, 3)


@pytest.mark.parametrize(
    ("rows", "split", "sizes"), [(40, "99,1,0", [39, 1]), (2, "99,1,0", [1, 1]), (3, "98,1,1", [1, 1, 1])]
)
def test_each_share_of_a_split_has_an_example_where_there_are_enough(
    tmp_path: Path, rows: int, split: str, sizes: list[int]
) -> None:
    found = open_data(tmp_path, [{"prompt": "p", "completion": str(number)} for number in range(rows)], split=split)
    assert [part.samples_per_epoch for part in (found.train, found.valid, found.test) if part] == sizes


def test_segments_of_a_sample_name_their_rows_and_cover_all_but_its_padding(tmp_path: Path) -> None:
    rows = [converse(f"{number}?", f"<{number}>") for number in range(5)]
    open_data(tmp_path, rows)  # writes the tokenizer
    data = DataConfig(
        sft_data_path=str(tmp_path / "rows.jsonl"),
        tokenizer_model=str(tmp_path / "tok"),
        data_path=str(tmp_path),
        split="100,0,0",
        packed_sequence=True,
    )
    train = open_instruction_datasets(data, 300, 159, seed=1).train
    assert isinstance(train, InstructionDataset)
    tokenizer = ExampleEncoder(str(tmp_path / "tok")).tokenizer
    found = {}
    for index in range(train.samples_per_epoch):
        segments, sample = list_segments(train, index, tokenizer), train[index]
        assert [each.first_token for each in segments] == [
            sum(before.tokens for before in segments[:place]) for place in range(len(segments))
        ]
        assert sum(each.tokens for each in segments) == (sample[EXAMPLE] > 0).sum() < 160
        assert sum(each.tokens for each in segments if each.is_counted) == sample[COUNTED].sum()
        found |= {each.row: each.text for each in segments if each.is_counted}
    assert found == {number + 1: f"<{number}><|im_end|>" for number in range(5)}


@pytest.mark.parametrize(
    ("row", "asked", "text", "ends"),
    [
        (converse("q", "a"), "", "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", ["<|im_end|>"]),
        (converse("q", "a"), "z", "<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n", ["<|im_end|>"]),
        (
            {"system": "s", "conversations": converse("q", "a", "r", "b")["messages"]},
            "z",
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n",
            ["<|im_end|>"],
        ),
        ({"prompt": "p", "completion": "c"}, "", "p", ["<|im_end|>"]),
        ({"prompt": "p", "completion": "c"}, "z", "z", ["<|im_end|>"]),
    ],
)
def test_a_prompt_has_the_form_of_the_examples(
    tmp_path: Path, row: dict[str, Any], asked: str, text: str, ends: list[str]
) -> None:
    encoder = ExampleEncoder(write_tokenizer(tmp_path / "tok"))
    found, ids, stop = encoder.encode_prompt(parse_example(row, "row"), asked)
    assert (found, encoder.tokenizer.decode(ids)) == (text, text)
    assert {encoder.tokenizer.decode([token]) for token in stop} == set(ends)


def test_rows_and_the_template_are_checked_before_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = converse("q", "a"), {"text": "x"}
    data = DataConfig(sft_data_path=write_rows(tmp_path / "a.jsonl", [good] * 4), tokenizer_model=str(tmp_path / "tok"))
    write_tokenizer(tmp_path / "tok")
    assert check_rows(data) == []
    for rows, valid in (([good, bad], None), ([good], [good, bad])):
        path = write_rows(tmp_path / "b.jsonl", rows)
        other = write_rows(tmp_path / "valid.jsonl", valid) if valid else None
        with pytest.raises(UsageError, match=f"{'valid' if valid else 'b'}.jsonl:2: unknown form"):
            check_rows(structs.replace(data, sft_data_path=path, sft_valid_data_path=other))
    assert check_rows(structs.replace(data, sft_valid_data_path="hf:org/rows")) == [
        "hf:org/rows: its rows are checked when training begins, not before the launch"
    ]
    monkeypatch.setattr(row_check, "CHECKED_ROWS", 3)
    late = [f"{tmp_path}/a.jsonl: rows after 3 are checked when training begins"]
    for rows, notes in (([good] * 3, []), ([good] * 4, late), ([*[good] * 4, bad], late)):
        write_rows(tmp_path / "a.jsonl", rows)
        assert check_rows(data) == notes
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "p", "completion": "c"}])
    bare = write_tokenizer(tmp_path / "bare", None)
    assert check_rows(structs.replace(data, sft_data_path=pairs, tokenizer_model=bare)) == []
    with pytest.raises(UsageError, match=r"a.jsonl:1: the tokenizer .*bare has no chat template"):
        check_rows(structs.replace(data, tokenizer_model=bare))
    assert check_rows(structs.replace(data, tokenizer_model="owner/of-the-hub")) == late
    refusing = write_tokenizer(tmp_path / "refusing", "{{ raise_exception('no') }}")
    with pytest.raises(UsageError, match="refuses the messages: no"):
        check_rows(structs.replace(data, tokenizer_model=refusing))
