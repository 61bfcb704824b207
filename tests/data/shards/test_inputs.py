from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.data.shards.inputs import Inputs, hash_contents, open_files, open_input
from primus.errors import UsageError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with a file, and a link to another folder."""
    (tmp_path / "text" / "deep").mkdir(parents=True)
    (tmp_path / "text" / "deep" / "a.jsonl").write_text('{"text": "a fox"}\n')
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "text" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to("text")
    return tmp_path / "text"


def opened(given: Path | str, output: Path, is_folder: bool = True) -> Inputs:
    return open_input([str(given)], None, output, is_folder=is_folder)


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize(
    ("given", "output"),
    [
        ("text", "text/new/out"),
        ("link", "text/out"),
        ("text", "link/out"),
        ("text", "elsewhere/out"),
        ("text", "text/deep/../out"),
        ("**/*.jsonl", "text/out"),
        ("*/deep/*.jsonl", "text/deep"),
        ("link/**/*.jsonl", "text/out"),
        ("te[x]t/*/*.jsonl", "text/out"),
    ],
)
def test_an_output_that_the_same_command_would_read_is_refused(
    tmp_path: Path, text: Path, given: str, output: str, is_folder: bool
) -> None:
    with pytest.raises(UsageError, match="the output is inside the input"):
        opened(tmp_path / given, tmp_path / output, is_folder)


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ("text", "texts"),
        ("text", "out/new"),
        ("text/deep/a.jsonl", "text/out"),
        ("text/*/*.jsonl", "text/out/new"),
        ("text/*/a*.jsonl", "text"),
        ("text/deep/*.jsonl", "text/out"),
    ],
)
def test_an_output_beside_the_input_is_not_refused(tmp_path: Path, text: Path, given: str, output: str) -> None:
    assert opened(tmp_path / given, tmp_path / output, is_folder=False).num_bytes


def test_an_input_in_the_folder_that_is_written_is_refused_but_not_one_of_which_files_have_the_name(
    tmp_path: Path, text: Path
) -> None:
    with pytest.raises(UsageError, match="the input is inside the output"):
        opened(tmp_path / "link" / "deep" / "a.jsonl", text)
    with pytest.raises(UsageError, match="the input is inside the output"):
        opened(text, text)
    assert opened(text, text, is_folder=False).num_bytes


@pytest.mark.parametrize(
    "task", ["encode --tokenizer bpe:300", "prepare --tokenizer bpe:300", "clean --recipe minimal", "dedup"]
)
def test_every_task_refuses_an_output_in_its_input(text: Path, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["direct", "--", "data", *task.split(), "--input", str(text), "--output", str(text / "out")]
    assert main(words) == 2
    assert f"{text / 'out'}: the output is inside the input {text}\n" in capsys.readouterr().err
    assert sorted(path.name for path in text.iterdir()) == ["deep", "linked"]


def test_a_moved_input_is_the_same_and_what_else_has_changed_is_named(tmp_path: Path, text: Path) -> None:
    before = opened(text, tmp_path / "out")
    facts = before.collect_facts(list(map(hash_contents, before.shards)))
    shutil.copytree(text, tmp_path / "copy")
    assert not open_files([str(tmp_path / "copy")]).describe_difference(facts)
    with (text / "deep" / "a.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    assert open_files([str(text)]).describe_difference(facts) == f"{text} is new, gone or changed"
    both = [str(text), str(tmp_path / "copy")]
    before = open_files(both)
    facts = before.collect_facts(list(map(hash_contents, before.shards)))
    assert open_files(both[::-1]).describe_difference(facts) == "its inputs have another order"
    assert open_files(both[:1]).describe_difference(facts) == f"{both[1]} is new, gone or changed"


@pytest.mark.parametrize("name", ["fineweb", "owner/name:en"])
def test_a_dataset_of_the_hub_has_to_be_fetched_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="on the Hugging Face Hub") as caught:
        open_input((), name, tmp_path / "out")
    assert f"`data fetch {name} --output FOLDER`" in caught.value.hint
