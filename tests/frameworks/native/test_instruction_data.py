"""Fine-tuning on instruction data by native: what counts, and packed examples that do not see each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tests.data.instruction.test_instruction_data import converse, write_rows, write_tokenizer

from primus.config.extended_files import load_model
from primus.config.schema import DataConfig
from primus.data.instruction.dataset import EXAMPLE, TOKENS, open_instruction_datasets
from primus.frameworks.native.engine.batch import to_batch
from primus.frameworks.native.engine.loss import IGNORED
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.step import evaluate_batches, prepare_model

CPU = torch.device("cpu")


def open_samples(folder: Path, *, packed: bool) -> np.ndarray:
    """All samples of the first epoch [N, 3, S + 1]; the answers have 1 to 6 tokens, and one is empty."""
    rows = [converse(f"{n}+1?", "x" * n) for n in range(6)]
    data = DataConfig(
        sft_data_path=write_rows(folder / "rows.jsonl", rows),
        data_path=str(folder),
        tokenizer_model=str(folder / "tok"),
        packed_sequence=packed,
        split="100,0,0",
    )
    found = open_instruction_datasets(data, 512, 128, 1).train
    return np.stack([found[number] for number in range(found.samples_per_epoch)])


def test_packed_examples_have_the_loss_of_each_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok")
    packed, single = open_samples(tmp_path, packed=True), open_samples(tmp_path, packed=False)
    assert len(packed) < len(single)
    trainable = prepare_model(build_model(load_model("tiny.yaml"), "cpu", 1), device="cpu")
    batch = to_batch(packed, None, CPU)
    together, tokens = evaluate_batches(trainable, [batch])
    alone, own_tokens = evaluate_batches(trainable, [to_batch(sample[None], None, CPU) for sample in single])
    assert tokens == own_tokens and abs(together - alone) < 1e-6 * tokens
    # Without the numbers of the examples they see each other: the comparison can fail.
    assert abs(evaluate_batches(trainable, [batch[:2]])[0] - alone) > 1e-4 * tokens


def test_only_answers_are_targets(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tok")
    sample = open_samples(tmp_path, packed=True)[:1]
    _, targets, examples = to_batch(sample, masked_input=5, device=CPU)
    from primus.data.tokenizers.load import load_tokenizer

    counted = load_tokenizer(tokenizer, parse_special_tokens=True).exact.decode(targets[targets != IGNORED].tolist())
    assert set(counted.replace("<|im_end|>", "")) <= {"x"}
    assert counted.count("<|im_end|>") == sample[0, EXAMPLE].max() == examples.max()
    nothing = to_batch(np.where(np.arange(3)[:, None] == TOKENS, sample, 0), None, CPU)
    trainable = prepare_model(build_model(load_model("tiny.yaml"), "cpu", 1), device="cpu")
    assert evaluate_batches(trainable, [nothing]) == (0.0, 0), "a micro batch without any answer"
