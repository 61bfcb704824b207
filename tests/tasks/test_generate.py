"""`generate`: text by a checkpoint, from prompts, files and standard input; and what it refuses."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_models import draw_hub_tensors, make_spec
from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, open_checkpoint
from primus.checkpoint.weights import TensorDict
from primus.cli.main import main
from primus.data.tokenizers.load import load_tokenizer
from primus.frameworks.native import compute_logits
from primus.package_files import find_example

TOKENIZER = find_example("posttrain/quickstart.yaml").parent / "tokenizer"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with the tokenizer of the example, one token for each byte."""
    base = tmp_path_factory.mktemp("model")
    spec = make_spec(vocab_size=260, max_position_embeddings=200)
    opened = OpenedCheckpoint(TensorDict(draw_hub_tensors(spec)), spec, None, FoundCheckpoint("native", base, None))
    write_conversion(plan_conversion(opened, TargetSettings("huggingface")), base / "hf", lambda _: None)
    shutil.copytree(TOKENIZER, base / "hf", dirs_exist_ok=True)
    return base / "hf"


def generate(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    greedy = () if "--temperature" in words else ("--temperature", "0")
    assert main(["direct", "--", "generate", *map(str, words), *greedy, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found if isinstance(found, list) else [found]


def test_a_prompt_is_continued_by_the_likeliest_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [found] = generate(capsys, folder, "--prompt", "two words", "--max-new-tokens", "6")
    opened = open_checkpoint(str(folder))
    tokens = [*load_tokenizer(str(folder)).encode("two words"), *found["tokens"]]
    logits = compute_logits(opened.spec, opened.weights, torch.tensor([tokens[:-1]]))[0, -6:]
    assert found["tokens"] == logits.argmax(1).tolist()
    scores = logits.log_softmax(1).gather(1, torch.tensor(found["tokens"])[:, None])[:, 0]
    assert found["log_probabilities"] == pytest.approx(scores.tolist(), abs=1e-4)


def test_prompts_of_a_file_are_those_of_single_calls_in_any_batches(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (1, 9, 4)))
    found = generate(capsys, folder, "--file", tmp_path / "prompts.jsonl", "--max-new-tokens", "5", "--batch-size", "2")
    for answer in found:
        [alone] = generate(capsys, folder, "--prompt", answer["prompt"], "--max-new-tokens", "5")
        assert alone["tokens"] == answer["tokens"]
        assert alone["log_probabilities"] == pytest.approx(answer["log_probabilities"], abs=1e-4)


def test_a_conversation_is_answered_in_the_chat_template_turn_by_turn(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand now?\n"))
    assert (
        main(
            ["direct", "--", "generate", str(folder), "--chat", "--max-new-tokens", "4", "--temperature", "0", "--json"]
        )
        == 0
    )
    decoder, text, found = json.JSONDecoder(), capsys.readouterr().out.strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    first, second = found
    assert first["prompt"] == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert second["prompt"].startswith(first["prompt"] + first["text"])
    assert second["prompt"].endswith("<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_ends_before_a_stop_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (folder, "--prompt", "a", "--temperature", "1", "--seed", "3", "--max-new-tokens", "60")
    [whole] = generate(capsys, *options)
    stop = whole["text"][10:12]
    [found] = generate(capsys, *options, "--stop", stop)
    assert found["text"] == whole["text"][: whole["text"].index(stop)]
    assert found["stop_reason"] == "stop"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "generate needs a prompt"),
        (("--prompt", " "), "prompt 1 is empty"),
        (("--prompt", "a", "--file", "b"), "--prompt and --file are both given"),
        (("--prompt", "a" * 300), "prompt 1 has 300 tokens, which leave no room in a context of 200"),
        (("--prompt", "a", "--temperature", "-1"), "temperature"),
        (("--prompt", "a", "--tokenizer", "LARGE"), "has ids up to 260"),
        (("--file", "missing.txt"), "missing.txt: cannot be read"),
    ],
)
def test_a_wrong_request_is_one_message(
    folder: Path, tmp_path: Path, words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large"
    shutil.copytree(TOKENIZER, large)
    content = json.loads((large / "tokenizer.json").read_text())
    token = content["added_tokens"][0]
    content["added_tokens"] += [token | {"id": number, "content": f"<|{number}|>"} for number in (258, 259, 260)]
    (large / "tokenizer.json").write_text(json.dumps(content))
    given = [str(large) if word == "LARGE" else word for word in words]
    assert main(["direct", "--", "generate", str(folder), *given]) == 2
    assert problem in capsys.readouterr().err


def test_a_checkpoint_without_a_tokenizer_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path / name)
    assert main(["direct", "--", "generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
