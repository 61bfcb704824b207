"""The check of what counts: refused at the start of a run and by `config check`, and seen by `data inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.data.instruction.test_instruction_data import TEMPLATE, converse, open_data, write_rows, write_tokenizer
from tests.data.instruction.test_turns import MARKED, WITH_TOOLS, mark

from primus.config.extended_files import load_model
from primus.config.schema import DataConfig, Trainer, TrainingConfig
from primus.data.instruction.row_check import check_first_masks
from primus.errors import UsageError

CALLING = converse("q", "a", "r", "b")
CALLING["messages"][1] |= {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("template", "row", "problem"),
    [
        (TEMPLATE, mark(converse("q", "a"), train=False), "no token counts in the loss"),
        (TEMPLATE, {"prompt": "", "completion": "text"}, "every token counts in the loss"),
        (
            "{% generation %}" + TEMPLATE.replace("{% if add", "{% endgeneration %}{% if add"),
            converse("q", "a"),
            "every token counts in the loss",
        ),
        (TEMPLATE.replace("<|im_end|>\n", "\n\n"), converse("q", "a"), r"the token that ends an answer does not count"),
        (
            MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
            converse("q", "aa"),
            r"the token that ends an answer does not count \(answers end with 'a'\)",
        ),
        (
            MARKED.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
            converse("q", "a"),
            r"row 1: in training the chat template writes '.*assistant\\na.*' where a server writes '.*<think>",
        ),
        (
            MARKED.replace("assistant\n{% endif %}", "assistant{% endif %}"),
            converse("q", "a"),
            r"behind the prompt of a server, training has '\\na.*', which does not count",
        ),
        (TEMPLATE, CALLING, "row 1: the chat template does not render tool_calls"),
        (TEMPLATE, {**converse("q", "a"), "tools": [{"name": "f"}]}, "does not render the column tools"),
        (TEMPLATE, converse("q", "a" * 300), "1 of 1 answers do not fit into seq_length 250"),
    ],
)
def test_data_that_teaches_something_else_is_refused_by_the_run_and_by_the_check(
    tmp_path: Path, template: str, row: dict[str, Any], problem: str
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tok", template)
    with pytest.raises(UsageError, match=problem) as caught:
        open_data(tmp_path, [row], seq_length=250)
    assert "allow_mask_problems: true" in caught.value.hint
    data = DataConfig(sft_data_path=str(tmp_path / "rows.jsonl"), tokenizer_model=tokenizer)
    trainer = Trainer(
        framework="native", model=load_model("tiny.yaml"), training=TrainingConfig(seq_length=250), data=data
    )
    with pytest.raises(UsageError, match=problem):
        check_first_masks(trainer)


def test_two_tokens_at_the_begin_of_a_document_are_refused(tmp_path: Path) -> None:
    template = ("<|im_start|>" + TEMPLATE).replace("<|im_start|>", "<s>")
    file = Path(write_tokenizer(tmp_path / "tok", template)) / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<s>"))
    for row in (converse("q", "a"), {"prompt": "<s>q", "completion": "a"}):
        with pytest.raises(UsageError, match="examples begin with <s> twice"):
            open_data(tmp_path, [row], seq_length=100)
    assert open_data(tmp_path, [{"prompt": "q", "completion": "a"}]).train.samples_per_epoch == 1


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (TEMPLATE, converse("q", "a", "r", "b")),
        (MARKED, converse("q", "a", "r", "b")),
        (MARKED, mark(converse("q", "a", "r", "b"), train=False)),
        (WITH_TOOLS, {**CALLING, "tools": [{"name": "f"}]}),
    ],
)
def test_sound_data_has_no_problem(tmp_path: Path, template: str, row: dict[str, Any]) -> None:
    write_tokenizer(tmp_path / "tok", template)
    (report,) = open_data(tmp_path, [row], seq_length=200).mask_reports
    assert report.problems == () and report.notes == ()
    assert 0 < report.counted_tokens < report.tokens


def test_a_problem_is_allowed_by_its_key_and_shown_in_the_report(tmp_path: Path) -> None:
    (report,) = open_data(tmp_path, [{"prompt": "", "completion": "a"}], allow_mask_problems=True).mask_reports
    assert [each.problem for each in report.problems] == ["every token counts in the loss, prompts too"]


def test_texts_note_that_a_server_would_use_the_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", TEMPLATE)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "pp", "completion": "a"}])
    data = DataConfig(sft_data_path=rows, tokenizer_model=str(tmp_path / "tok"))
    trainer = Trainer(framework="native", model=load_model("tiny.yaml"), data=data)
    (note,) = check_first_masks(trainer)
    assert "without the chat template of the tokenizer" in note
