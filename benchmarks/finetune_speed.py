"""CPU time of fine-tuning with packing: native against trl, and adapters against all weights.

    python benchmarks/finetune_speed.py --rival PYTHON

PYTHON is the interpreter of an environment with trl. Each program trains the same model (random weights, float32, one
thread) on the same conversations, a few and many steps; the difference is the time of the steps, without starts. CPU
time, because the machine may have other work; in turns, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"hidden_size": 256, "num_layers": 4, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 768}
VOCABULARY, LENGTH, BATCH = 512, 512, 4


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", help="Python of an environment with trl")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=2, default=(5, 35))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = write_data(folder)
        rivals = ("trl",) if options.rival else ()
        costs: dict[str, list[float]] = {kind: [] for kind in ("native", "native lora", *rivals)}
        subprocess.run(native_command(folder, "start", 1, "none"), check=True, capture_output=True, cwd=folder)
        for repeat in range(options.repeats):
            for kind in costs:
                few, many = options.steps
                times = [measure(folder, f"{repeat}-{steps}", kind, steps, options.rival) for steps in (few, many)]
                costs[kind].append((times[1] - times[0]) / (many - few))
        for kind, found in costs.items():
            cost = statistics.median(found)
            spread = (max(found) - min(found)) / cost
            print(f"{kind:12} {cost:.3f} CPU s/step, {tokens / cost:,.0f} tokens/CPU s, spread {spread:.0%}")


def write_data(folder: Path) -> float:
    """Write conversations and a tokenizer; returns the tokens in a step, which all programs fill by best fit."""
    draw = random.Random(1)
    words = ["alpha", "bread", "cloud", "delta", "eleven", "forest", "green", "house"]
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(2000):
            texts = [" ".join(draw.choices(words, k=draw.randint(3, 30))) for _ in range(2)]
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
            file.write(json.dumps({"messages": turns}) + "\n")
    tokenizer = folder / "tok"
    tokenizer.mkdir()
    source = ROOT / "examples" / "posttrain" / "tokenizer"
    (tokenizer / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return BATCH * LENGTH


def measure(folder: Path, name: str, kind: str, steps: int, rival: str | None) -> float:
    """CPU seconds of a run with all its processes."""
    if kind == "trl":
        argv = [str(rival), __file__, "train", str(folder), str(steps)]
    else:
        argv = native_command(folder, f"{kind.replace(' ', '-')}-{name}", steps, "lora" if "lora" in kind else "none")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def native_command(folder: Path, name: str, steps: int, peft: str) -> list[str]:
    """The command of a run of native; adapters start from the run named start."""
    overrides = {
        **SIZES,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "sft_data_path": str(folder / "rows.jsonl"),
        "tokenizer_model": str(folder / "tok"),
        "data_path": str(folder / "data"),
        "split": "100,0,0",
        "packed_sequence": True,
        "truncation": "right",
        "seq_length": LENGTH,
        "micro_batch_size": BATCH,
        "global_batch_size": BATCH,
        "train_iters": steps,
        "eval_iters": 0,
        "bf16": False,
        "compile": False,
        "device": "cpu",
        "lr": 1e-3,
        "sample_tokens": 0,
        "save_interval": 1000,
        "disable_last_saving": name != "start",
    }
    if peft != "none":
        start = (folder / "output" / "start" / "latest").resolve() / "checkpoints" / "step_00000001"
        overrides |= {"peft": peft, "peft_dim": 8, "load": str(start), "finetune": True}
    module = {"framework": "native", "config": "sft_trainer.yaml", "model": "tiny.yaml", "overrides": overrides}
    experiment = {"exp_name": name, "workspace": str(folder / "output"), "modules": {"post_trainer": module}}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(experiment))  # JSON is YAML
    return [str(ROOT / "primus-cli"), "direct", "--", "train", "posttrain", "--config", str(file)]


def train_rival(folder: Path, steps: int) -> None:
    """Train with trl in this process."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=SIZES["hidden_size"],
            intermediate_size=SIZES["ffn_hidden_size"],
            num_hidden_layers=SIZES["num_layers"],
            num_attention_heads=SIZES["num_attention_heads"],
            num_key_value_heads=SIZES["num_query_groups"],
            max_position_embeddings=LENGTH,
        )
    )
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        packing=True,
        max_length=LENGTH,
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=1e-3,
        assistant_only_loss=True,
        activation_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tok"), pad_token="<|im_end|>")
    rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "hf"))
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    print(trainer.state.log_history[-2].get("num_tokens"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train_rival(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
