"""What users of torchrun, Slurm, Megatron-LM, torchtitan and Hugging Face type first, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.cli.main import main

EXPERIMENT = """\
exp_name: first
modules: {pre_trainer: {model: llama_quickstart, overrides: {mock_data: true, train_iters: 2}}}
"""
FILES = {
    "e.yaml": EXPERIMENT,
    "fsdp.yaml": "distributed_type: FSDP\nnum_machines: 2\n",
    "zero.json": '{"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}\n',
    "sweep.yaml": "modules_of_sweep: [a]\n",
    "finetune.sh": "python train.py --lr 1e-4\n",
    "configs/small.yaml": EXPERIMENT,
}
MADE_BY = "an experiment file has 'modules:', as config init writes it"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ("-- container --image i -- data verify", "'--' before the runtime 'container'", "container ... -- <task>"),
        ("srun -N 4 -- train pretrain", "no runtime 'srun'", "use primus-cli slurm srun ... -- <task>"),
        ("podman run x", "no runtime 'podman'", "use primus-cli container --image IMAGE ... -- <task>"),
        ("deepspeed --num_gpus 8 x.py", "no runtime 'deepspeed'", "use primus-cli direct ... -- <task>"),
        ("direct -- posttrain --config e.yaml", "no task 'posttrain'", "did you mean 'train posttrain'?"),
        ("direct -- verify x", "no task 'verify'", "did you mean 'checkpoint verify' or 'data verify'?"),
        (
            "direct -- pretrain_gpt.py --lr 1",
            "'pretrain_gpt.py' is a script, not a task",
            "config import reads scripts",
        ),
        ("direct --nproc auto -- train pretrain", "--nproc auto: expected int", "else one per accelerator, else 1"),
        ("ssh node7 -- data verify", "unexpected word 'node7'", "pass it as --hosts node7"),
        ("direct -- data prepare books.jsonl", "unexpected word 'books.jsonl'", "pass it as --input books.jsonl"),
        ("direct -- train pretrain --config e.yaml --device rocm", "'rocm' is not possible", "did you mean 'cuda'?"),
        ("direct -- train pretrain --config e.yaml -seed 7", "unexpected word '-seed'", "written --seed VALUE"),
        ("direct -- train pretrain --config fsdp.yaml", "fsdp.yaml:1: unknown key 'distributed_type'", MADE_BY),
        ("direct -- config check --config zero.json", "zero.json:1: unknown key 'gradient_clipping'", MADE_BY),
        ("direct -- config check --config sweep.yaml", "unknown key 'modules_of_sweep'", MADE_BY),
        ("direct -- config check --config finetune.sh", "finetune.sh:1: expected keys", "config import reads scripts"),
        ("direct -- config check --config configs", "configs: a folder, not a file", "such as configs/small.yaml"),
    ],
)
def test_a_habit_of_another_tool_is_answered_with_what_to_type(
    words: str, problem: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert problem in said and hint in said and "Traceback" not in said
