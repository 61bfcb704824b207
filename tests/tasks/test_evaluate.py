"""`evaluate`: the loss of a run's own data, of files, answers that match, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.training_runs import write_training_run
from primus import experiment
from primus.checkpoint.formats.open import open_checkpoint
from primus.cli.main import main
from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.tokenizers.load import load_tokenizer
from primus.frameworks import native
from primus.runs import events
from primus.runs.attempt import Attempt
from primus.runs.evaluations import read_evaluations
from primus.runs.files import write_json
from primus.runs.store import Run, RunMetadata

SETTINGS = {
    "seq_length": 32,
    "train_iters": 2,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "eval_iters": 2,
    "eval_interval": 2,
    "split": "50,50,0",
    "dataset": None,
    "compile": False,
    "disable_tensorboard": True,
    "lr_warmup_iters": 0,
    "sample_tokens": 0,
    "train_data_path": "data/c_text_document",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two steps, started where its relative path of the data is right."""
    folder = tmp_path_factory.mktemp("work")
    lines = (json.dumps({"text": f"document {n} on trees and {n * n} birds"}) for n in range(80))
    (folder / "text.jsonl").write_text("\n".join(lines))
    prepare_token_files(EncodeJob(output=folder / "data/c", tokenizer="bpe:300", inputs=(str(folder / "text.jsonl"),)))
    run = write_training_run(folder / "out", SETTINGS)
    metadata = RunMetadata(id="20260102_030405-abcd", name="test", task="t", created=1.0, working_folder=str(folder))
    write_json(run.directory / "metadata.json", metadata)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        attempt = Attempt(run, 0)
        try:
            native.train(experiment.read_run_experiment(run), attempt)
        finally:
            attempt.close()
    return run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: not that of the run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The metrics of each evaluation by its name."""
    assert main(["direct", "--", "evaluate", *map(str, words), "--json"]) == 0
    return {each["name"]: each["metrics"] for each in json.loads(capsys.readouterr().out)["evaluations"]}


def test_the_loss_on_the_data_of_a_run_is_that_of_its_last_evaluation_bit_by_bit(
    trained: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    [*_, last] = [event for event in events.read_events(trained.events) if event["kind"] == "eval"]
    found = evaluate(capsys, trained.directory)["validation"]
    assert (found["loss"], found["tokens"]) == (last["loss"], last["tokens"])
    assert found["perplexity"] == math.exp(last["loss"])
    fewer = evaluate(capsys, trained.directory, "--limit", "2")["validation"]
    assert (fewer["samples"], fewer["tokens"]) == (2, 64)

    [kept] = read_evaluations(trained)  # the second one replaced the first
    assert (kept.step, kept.metrics) == (2, fewer)
    assert main(["direct", "--", "runs", "show", str(trained.directory)]) == 0
    assert "validation    perplexity" in capsys.readouterr().out
    assert main(["direct", "--", "runs", "diff", str(trained.directory), str(trained.directory)]) == 0
    assert "evaluations: no difference" in capsys.readouterr().out


def test_a_text_is_predicted_token_by_token_in_pieces(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["on trees and birds, and on documents", "birds on 16 trees"]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    opened = open_checkpoint(str(trained.directory))
    tokenizer = load_tokenizer(str(trained.directory.parents[1] / "data/c_text_document.tokenizer.json"))
    losses = []
    for text in texts:
        tokens = tokenizer.encode(text)
        pieces = [tokens[begin : begin + 6] for begin in range(0, len(tokens) - 1, 5)]
        scores = [native.compute_logits(opened.spec, opened.weights, torch.tensor([each])) for each in pieces]
        pairs = zip(scores, pieces, strict=True)
        losses.append([-s[0, n].log_softmax(0)[t].item() for s, p in pairs for n, t in enumerate(p[1:])])
    found = evaluate(capsys, trained.directory, "--data", "a.txt", "--seq-length", "5")["data a.txt"]
    assert found["tokens"] == len(losses[0]) == len(tokenizer.encode(texts[0])) - 1
    assert found["loss"] == pytest.approx(sum(losses[0]) / len(losses[0]), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(sum(losses[0]) / math.log(2) / len(texts[0]), rel=1e-6)
    found = evaluate(capsys, trained.directory, "--data", "b.jsonl", "--seq-length", "5", "--batch-size", "3")
    both = losses[0] + losses[1]
    assert found["data b.jsonl"]["loss"] == pytest.approx(sum(both) / len(both), rel=1e-6)


def test_answers_match_where_they_are_those_of_greedy_generation(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["document 7 on", "birds", "trees and"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    words = [
        "generate",
        str(trained.directory),
        "--file",
        "prompts.txt",
        "--temperature",
        "0",
        "--max-new-tokens",
        "5",
        "--json",
    ]
    assert main(["direct", "--", *words]) == 0
    answers = [each["text"] for each in json.loads(capsys.readouterr().out)]
    answers[1] += "x"
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--exact-match", "m.jsonl", "--max-new-tokens", "5", "--batch-size", "2"]
    found = evaluate(capsys, trained.directory, *words)["exact_match m.jsonl"]
    assert found == {"exact_match": 2 / 3, "matches": 2, "prompts": 3}


def test_rows_of_post_training_count_their_answers(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps({"prompt": "trees and", "completion": " birds on trees"}))
    tokenizer = load_tokenizer(str(trained.directory.parents[1] / "data/c_text_document.tokenizer.json"))
    found = evaluate(capsys, trained.directory, "--data", "r.jsonl")["data r.jsonl"]
    assert found["tokens"] == len(tokenizer.encode(" birds on trees")) + 1  # and the end
    assert "bits_per_byte" not in found


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("--data", "missing.txt"), 2, "missing.txt: cannot be read"),
        (("--exact-match", "m.jsonl"), 2, "m.jsonl:1: a row needs an answer"),
        (("--stop", "x"), 2, "--stop and --chat are for --exact-match only"),
    ],
)
def test_a_wrong_request_is_one_message(
    trained: Run, tmp_path: Path, words: tuple[str, ...], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.jsonl").write_text('{"prompt": "a"}')
    assert main(["direct", "--", "evaluate", str(trained.directory), *words]) == code
    assert problem in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_a_missing_harness_is_one_message_with_the_command(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["direct", "--", "evaluate", str(trained.directory), "--tasks", "arc_easy"]) == 3
    assert "-m pip install lm-eval" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the harness and of datasets
def test_tasks_of_the_harness_are_answered_by_log_likelihood_and_by_greedy_text(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    choices, prompt = [" birds", " documents"], "trees and"
    opened = open_checkpoint(str(trained.directory))
    tokenizer = load_tokenizer(str(trained.directory.parents[1] / "data/c_text_document.tokenizer.json"))
    sums = []
    for choice in choices:
        tokens, begin = tokenizer.encode(prompt + choice), len(tokenizer.encode(prompt))
        scores = native.compute_logits(opened.spec, opened.weights, torch.tensor([tokens[:-1]]))[0].log_softmax(1)
        sums.append(sum(scores[n - 1, tokens[n]].item() for n in range(begin, len(tokens))))
    likelier = sums.index(max(sums))
    assert (
        main(["direct", "--", "generate", str(trained.directory), "--prompt", prompt, "--temperature", "0", "--json"])
        == 0
    )
    text = json.loads(capsys.readouterr().out)[0]["text"]
    rows = [{"q": prompt, "label": likelier, "text": text}, {"q": prompt, "label": 1 - likelier, "text": "x"}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/d.jsonl}}}}\ntest_split: test\n"
    (tmp_path / "tasks/choice.yaml").write_text(
        f"task: choice\n{data}output_type: multiple_choice\ndoc_to_text: '{{{{q}}}}'\ndoc_to_target: label\n"
        "doc_to_choice: [' birds', ' documents']\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "tasks/text.yaml").write_text(
        f"task: text\n{data}output_type: generate_until\ndoc_to_text: '{{{{q}}}}'\ndoc_to_target: '{{{{text}}}}'\n"
        "generation_kwargs: {until: [], max_gen_toks: 128}\nmetric_list: [{metric: exact_match}]\n"
    )
    (tmp_path / "tasks/rolling.yaml").write_text(
        f"task: rolling\n{data}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{q}}}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n"
    )
    found = evaluate(capsys, trained.directory, "--tasks", "choice,text,rolling", "--include-path", "tasks")
    assert found["task choice"]["acc"] == 0.5
    assert found["task text"]["exact_match"] == 0.5
    tokens = [tokenizer.eod_id, *tokenizer.encode(prompt)]
    scores = native.compute_logits(opened.spec, opened.weights, torch.tensor([tokens[:-1]]))[0].log_softmax(1)
    bits = -scores.gather(1, torch.tensor(tokens[1:])[:, None]).sum().item() / math.log(2) / len(prompt)
    assert found["task rolling"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
