"""`data verify`, `data fingerprint` and `data inspect` as they are typed."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primus.cli.main import main
from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.megatron.indexed_dataset import IndexedTokens, IndexedWriter, bin_path

TEXTS = [f"Sentence {number} of a text about wizards.\n" * (number + 1) for number in range(12)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of tokens with a manifest."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, ""]) + "{\n")
    from primus.data.megatron.manifest import EncodeRecipe

    job = EncodeJob(
        output=folder / "c", tokenizer="bpe:300", inputs=(str(folder / "text.jsonl"),), recipe=EncodeRecipe(max_bad=1)
    )
    return prepare_token_files(job)[0].prefix


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a task, and returns its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        code = main(["direct", "--", "data", *words])
        return code, capsys.readouterr().out

    return run


Run = Callable[..., tuple[int, str]]


def corrupted(made: Path, folder: Path) -> Path:
    """A copy of which one token is another."""
    for file in made.parent.glob(f"{made.name}.*"):
        (folder / file.name).write_bytes(file.read_bytes())
    prefix = folder / made.name
    content = bytearray(bin_path(prefix).read_bytes())
    content[100] ^= 1
    bin_path(prefix).write_bytes(content)
    return prefix


def test_verify_ends_with_1_where_anything_is_corrupt(run: Run, made: Path, tmp_path: Path) -> None:
    bad = corrupted(made, tmp_path)
    code, text = run("verify", str(made), "--samples", "1")
    assert code == 0 and ": ok (" in text and "wizards" in text
    code, text = run("verify", str(made), f"{tmp_path}/*_document", "--json")
    reports = json.loads(text)["reports"]
    assert code == 1
    assert [bool(report["findings"]) for report in reports] == [False, True]
    assert run("verify", str(bad))[1].startswith(f"{bad}: corrupt, 1 finding (")


@pytest.mark.parametrize(
    "words",
    [
        ["verify"],
        ["verify", "nowhere/x"],
        ["fingerprint", "nowhere/*"],
        ["inspect"],
        ["inspect", "nowhere/x", "--run", "r"],
        ["inspect", "nowhere/x", "--document", "-1"],
        ["inspect", "--run", "r"],
        ["inspect", "--run", "r", "--sample", "-1"],
    ],
)
def test_a_mistake_ends_with_2(run: Run, words: list[str]) -> None:
    assert run(*words)[0] == 2


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["PREFIX", "--step", "3"], "--step"),
        (["PREFIX", "--world-size", "3"], "--world-size"),
        (["--run", "r", "--step", "3", "--set", "seed=1"], "--set"),
        (["--run", "r", "--step", "3", "--samples", "1"], "--samples"),
        (["--config", "e.yaml", "--step", "3", "--samples", "1"], "--samples"),
        (["--config", "e.yaml", "--step", "3", "--workspace", "x"], "--workspace"),
    ],
)
def test_an_option_that_means_nothing_is_an_error(
    made: Path, capsys: pytest.CaptureFixture[str], words: list[str], option: str
) -> None:
    words = [str(made) if word == "PREFIX" else word for word in words]
    assert main(["direct", "--", "data", "inspect", *words]) == 2
    assert f"{option} has no effect with" in capsys.readouterr().err


def test_fingerprint_compares_the_tokens_with_the_manifest(run: Run, made: Path, tmp_path: Path) -> None:
    code, text = run("fingerprint", str(made))
    assert code == 0 and "(as in its manifest)" in text
    code, text = run("fingerprint", str(corrupted(made, tmp_path)), "--json")
    found = json.loads(text)["files"][0]
    assert code == 1 and found["same"] is False and found["fingerprint"] != found["manifest"]
    assert json.loads(run("fingerprint", str(made), "--quick", "--json")[1])["fingerprint"] == found["manifest"]


def test_the_fingerprint_of_shards_is_that_of_the_whole(run: Run, made: Path, tmp_path: Path) -> None:
    whole = IndexedTokens(made)
    for name, first, last in (("a", 0, 5), ("b", 5, len(whole))):
        with IndexedWriter(tmp_path / name, np.dtype(np.int32)) as writer:
            for index in range(first, last):
                writer.add_document(whole[index])
            writer.commit()
    together = json.loads(run("fingerprint", str(tmp_path / "a"), str(tmp_path / "b"), "--json")[1])["fingerprint"]
    assert together == json.loads(run("fingerprint", str(made), "--json")[1])["fingerprint"]


def test_inspect_shows_what_files_hold(run: Run, made: Path, tmp_path: Path) -> None:
    picture = tmp_path / "lengths.svg"
    code, text = run("inspect", str(made), "--document", "3", "--json", "--output", str(picture))
    value = json.loads(text)
    assert code == 0
    assert value["documents"][0]["text"] == TEXTS[3] + "<|endoftext|>"
    assert (
        value["survey"]["documents"] == 12
        and sum(bar["count"] for bar in value["survey"]["lengths"]["histogram"]) == 12
    )
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    text = run("inspect", str(made), "--samples", "2", "--seed", "1", "--output", str(tmp_path / "page.html"))[1]
    assert "1 empty and 1 bad documents" in text and "text.jsonl" in text
    assert "most frequent of all tokens" in text and "\u2588" in text
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert run("inspect", str(made), "--samples", "2", "--seed", "1")[1] in text


@pytest.fixture
def experiment_file(made: Path, tmp_path: Path) -> Path:
    settings: dict[str, Any] = {
        "seq_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_data_path": str(made),
        "vocab_size": 300,
        "train_iters": 10,
        "eod_mask_loss": True,
    }
    module = {"framework": "native", "model": "tiny", "overrides": settings}
    path = tmp_path / "e.json"
    path.write_text(json.dumps({"exp_name": "t", "modules": {"pre_trainer": module}}))
    return path


def test_a_step_is_shown_with_the_documents_of_each_sample(run: Run, made: Path, experiment_file: Path) -> None:
    code, text = run("inspect", "--config", str(experiment_file), "--step", "3", "--world-size", "2", "--json")
    value = json.loads(text)
    assert code == 0
    assert [sample["sample"] for sample in value["samples"]] == list(range(16, 24))
    assert [(sample["rank"], sample["micro_batch"]) for sample in value["samples"]] == [
        (rank, micro) for micro in (0, 1) for rank in (0, 0, 1, 1)
    ]
    file = IndexedTokens(made)
    for sample in value["samples"]:
        joined: list[int] = []
        for part in sample["parts"]:
            first = part["first_token"]
            joined += file[part["sequence"]][first : first + part["tokens"]].tolist()
        assert joined == sample["ids"]
        assert sample["masked"] == [place for place, token in enumerate(sample["ids"][:-1]) if token == 0]


def test_one_rank_and_one_sample_can_be_picked(run: Run, experiment_file: Path) -> None:
    words = ("inspect", "--config", str(experiment_file), "--world-size", "2")
    one = json.loads(run(*words, "--step", "3", "--rank", "1", "--json")[1])["samples"]
    assert [sample["sample"] for sample in one] == [18, 19, 22, 23]
    assert json.loads(run(*words, "--sample", "22", "--json")[1])["samples"] == [one[2]]
    assert "step 3: samples 16 to 23" in run(*words, "--sample", "22")[1]
    assert run(*words, "--step", "3", "--sample", "24")[0] == 2
    assert run(*words, "--step", "3", "--rank", "2")[0] == 2
    changed = json.loads(run(*words, "--step", "3", "--set", "seed=5", "--json")[1])["samples"]
    assert changed[0]["ids"] != one[0]["ids"]


def test_without_a_mask_all_is_learnt(run: Run, experiment_file: Path) -> None:
    words = ("inspect", "--config", str(experiment_file), "--step", "3", "--set", "eod_mask_loss=false", "--json")
    assert all(sample["masked"] == [] for sample in json.loads(run(*words)[1])["samples"])


def test_the_documents_of_a_step_are_counted_as_documents_where_they_are_cut(
    run: Run, experiment_file: Path, tmp_path: Path
) -> None:
    with IndexedWriter(tmp_path / "cut", np.dtype(np.int32)) as writer:
        for number in range(30):
            writer.add_batch(np.full(60, number + 1), np.array([20, 30, 10]), np.array([False, False, True]))
        writer.commit()
    words = ("inspect", "--config", str(experiment_file), "--step", "3")
    changes = ("--set", f"train_data_path={tmp_path}/cut", "eod_mask_loss=false")
    for sample in json.loads(run(*words, *changes, "--json")[1])["samples"]:
        ids = [part["document"] + 1 for part in sample["parts"] for _ in range(part["tokens"])]
        assert ids == sample["ids"]
        assert all(part["sequence"] // 3 == part["document"] for part in sample["parts"])
    assert ", sequence " in run(*words, *changes)[1]


def test_a_step_of_fine_tuning_shows_prompts_answers_and_what_counts(run: Run, tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples" / "posttrain"
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"sft_data_path": tmp_path / "rows.jsonl", "sft_valid_data_path": tmp_path / "rows.jsonl"}
    changes |= {"tokenizer_model": examples / "tokenizer", "data_path": tmp_path, "packed_sequence": "false"}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    words = ["inspect", "--config", str(examples / "quickstart.yaml"), *words, "--step", "1", "--sample", "3"]
    code, text = run(*words, "--json")
    value = json.loads(text)
    (sample,), (segments,) = value["samples"], value["segments"].values()
    assert code == 0 and [each["is_counted"] for each in segments] == [False, True, False]
    answer = segments[1]
    assert answer["text"] == f"a{answer['row'] - 1}<|im_end|>"
    counted = set(range(256)) - set(sample["masked"])
    # A position predicts the token behind it.
    assert counted == set(range(answer["first_token"] - 1, answer["first_token"] + answer["tokens"] - 1))
    code, text = run(*words)
    assert f"  {len(counted)} of 256 predictions count in the loss\n" in text and "padding" in text
    assert f": row {answer['row']}, counts\n    {answer['text']}\n" in text
    assert re.match(r"\S+rows.jsonl: 9 examples, \d+ tokens, of which 27 \(\d+.\d%\) count in the loss\n", text)
    page = tmp_path / "page.html"
    assert run(*words, "--output", str(page), "--set", "allow_mask_problems=true")[0] == 0
    shown = re.findall(r'<span class="counted" title="token \d+: counts">(.*?)</span>', page.read_text())
    assert [html.unescape(token) for token in shown] == answer["pieces"] == ["a", str(answer["row"] - 1), "<|im_end|>"]
    # What a run refuses is shown, with the reason.
    code, text = run(*words, "--set", "seq_length=21")
    assert code == 0 and "problem: 9 of 9 answers do not fit into seq_length 21" in text


def test_samples_that_a_model_generates_are_those_of_runs_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["direct", "--", "data", "inspect", "--config", "examples:posttrain/quickstart-grpo", "--step", "1"]) == 2
    )
    assert "the samples of train rl are what the model generates" in capsys.readouterr().err
