"""`config examples` lists and copies the examples that come with the package, which `examples:NAME` names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.config.load import load_experiment
from primus.errors import UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line: str) -> int:
    return main(["direct", "--", "config", "examples", *line.split()])


def test_the_list_says_what_each_example_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quickstart"] == "A first run"
    assert {"posttrain/quickstart", "rival-cpu", "torchtitan/configs/llama3_8b"} <= set(found)
    assert not [name for name in found if name.startswith("plug-ins")]


def test_a_copy_has_what_the_example_extends_and_the_data_that_it_names(folder: Path) -> None:
    assert run("copy qwen3_0.6B-small examples:posttrain/quickstart.yaml --output mine") == 0
    copied = {str(path.relative_to(folder / "mine")) for path in folder.rglob("*") if path.is_file()}
    assert copied == {
        *("qwen3_0.6B-small.yaml", "quickstart.yaml", "posttrain/quickstart.yaml", "posttrain/conversations.jsonl"),
        *("posttrain/tokenizer/tokenizer.json", "posttrain/tokenizer/tokenizer_config.json"),
    }
    for name in copied:
        assert (folder / "mine" / name).read_bytes() == (ROOT / "examples" / name).read_bytes()


def test_a_folder_is_copied_as_a_whole(folder: Path) -> None:
    assert run("copy plug-ins/tasks") == 0
    assert (folder / "examples/plug-ins/tasks/tools/list_ranks.py").is_file()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("copy", "config examples copy needs a name"),
        ("copy quikstart", "no example 'quikstart'\n  did you mean 'quickstart'?"),
        ("copy ../README", "no example '../README'"),
        ("list quickstart", "config examples list accepts no names: quickstart"),
    ],
)
def test_what_is_no_example_is_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line) == 2 and message in capsys.readouterr().err


def test_a_file_that_exists_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "examples").mkdir()
    (folder / "examples/quickstart.yaml").write_text("mine")
    assert run("copy quickstart") == 2
    assert "examples/quickstart.yaml exists\n  --force replaces it" in capsys.readouterr().err
    assert (folder / "examples/quickstart.yaml").read_text() == "mine"
    assert run("copy quickstart --force") == 0


def test_an_experiment_is_named_as_an_example() -> None:
    found = load_experiment(Path("examples:quickstart"), environ={})
    assert found.experiment.exp_name == "quickstart"
    sft = load_experiment(Path("examples:posttrain/quickstart.yaml"), environ={})
    assert sft.experiment.trainer.data.sft_data_path == str(ROOT / "examples/posttrain/conversations.jsonl")
    with pytest.raises(UsageError, match="no example 'posttrain'"):
        load_experiment(Path("examples:posttrain"), environ={})
