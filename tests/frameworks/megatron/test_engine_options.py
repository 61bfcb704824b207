"""`schedule: engine`, `init: engine` and `dataloader: engine` give what Megatron gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from frameworks.torchtitan.runs import STEPS, compute_rates, write_start
from primus.config.schedule import compute_learning_rate

from .test_parity import build, run_code, train_all

pytestmark = [pytest.mark.engine("megatron"), pytest.mark.slow]

DOCUMENTS, LENGTH, SEED = 50, 23, 5
ORDER_CODE = """
import json, sys
from pathlib import Path
import msgspec
from primus.config.schema import Trainer
from primus.data.training.dataset import open_datasets
from primus.frameworks.megatron.engine.gpt_dataset import order_by_engine
request = json.loads(REQUEST)
trainer = msgspec.convert(request["trainer"], Trainer)
data = open_datasets(trainer.data, trainer.model.vocab_size, trainer.training.seq_length, trainer.training.seed)
own = order_by_engine(trainer, Path(request["folder"]), data, trainer.training.global_batch_size)
shares = {"train": own.train, "valid": own.valid}
samples = {name: [part[index].tolist() for index in range(request["counts"][name])] for name, part in shares.items()}
print("FOUND" + json.dumps([samples, own.fingerprint, data.fingerprint, own.train.samples_per_epoch]))
"""


def test_its_scheduler_gives_the_rate_of_each_step_also_after_a_resume(tmp_path: Path) -> None:
    own = build("llama", optimizer={"schedule": "engine", "lr_warmup_iters": 4})
    tokens = {"tokens": write_start(tmp_path / "start", own)["tokens"]}  # no weights: its own initial values
    saved = str(tmp_path / "saved")
    requests: list[dict[str, Any]] = [
        {**tokens, "last": STEPS},
        {**tokens, "last": 3, "save": saved},
        {**tokens, "load": saved, "first": 4, "last": 6},
    ]
    whole, _, resumed = train_all(tmp_path, [(own, request) for request in requests])
    # Megatron-LM steps its scheduler after the optimizer: each step has the rate that primus applies one step before.
    assert whole["rates"] == pytest.approx([0.0, *compute_rates(own)[:-1]], rel=1e-9)
    assert resumed["rates"] == whole["rates"][3:6]
    assert resumed["steps"] == whole["steps"][3:6]
    assert whole["steps"][-1][0] < whole["steps"][0][0]


def test_a_checkpoint_of_the_schedule_of_primus_continues_with_its_scheduler(tmp_path: Path) -> None:
    before, own = build("llama"), build("llama", optimizer={"schedule": "engine"})
    tokens = {"tokens": write_start(tmp_path / "start", own)["tokens"]}
    saved = str(tmp_path / "saved")
    runs = [(before, {**tokens, "last": 3, "save": saved}), (own, {**tokens, "load": saved, "first": 4, "last": 4})]
    _, resumed = train_all(tmp_path, runs)
    assert resumed["rates"] == pytest.approx([compute_learning_rate(3, own.optimizer, STEPS)])


def write_documents(prefix: Path) -> NDArray[np.int64]:
    """Token files whose documents have the same length; gives the tokens [document, token]."""
    from primus.data.megatron.indexed_dataset import IndexedWriter

    tokens = np.random.default_rng(1).integers(0, 500, (DOCUMENTS, LENGTH), dtype=np.int64)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_batch(tokens.ravel(), np.full(DOCUMENTS, LENGTH), np.ones(DOCUMENTS, dtype=np.bool_))
        writer.commit()
    return tokens


def order_as_megatron(tokens: NDArray[np.int64], size: int) -> list[list[int]]:
    """One epoch as in Megatron-LM (megatron/core/datasets/gpt_dataset.py): documents, then samples are shuffled."""
    random = np.random.RandomState(SEED)
    documents = np.arange(len(tokens))
    random.shuffle(documents)
    stream = tokens[documents].ravel()
    samples = np.arange((len(stream) - 1) // size)
    random.shuffle(samples)
    return [stream[number * size : (number + 1) * size + 1].tolist() for number in samples]


def test_the_samples_are_those_of_gpt_dataset(tmp_path: Path) -> None:
    import msgspec

    tokens = write_documents(tmp_path / "text")
    trainer = build(
        "llama",
        data={"train_data_path": str(tmp_path / "text"), "split": "80,20,0", "dataloader": "engine"},
        training={"seed": SEED, "train_iters": 3, "eval_iters": 1, "global_batch_size": 4},
    )
    counts = {"train": 12, "valid": 4}
    request = {"trainer": msgspec.to_builtins(trainer), "folder": str(tmp_path), "counts": counts}
    printed = run_code(ORDER_CODE.replace("REQUEST", repr(json.dumps(request)), 1))
    samples, fingerprint, own_fingerprint, epoch = json.loads(printed.rpartition("FOUND")[2])
    border = DOCUMENTS * 80 // 100
    size = trainer.training.seq_length
    assert samples["train"] == order_as_megatron(tokens[:border], size)[:12]
    assert samples["valid"] == order_as_megatron(tokens[border:], size)[:4]
    assert fingerprint != own_fingerprint and fingerprint.partition("-")[0] == own_fingerprint.partition("-")[0]
    assert epoch == pytest.approx(border * LENGTH / size, abs=1)


def test_a_split_that_leaves_a_share_without_documents_is_refused(tmp_path: Path) -> None:
    import msgspec

    write_documents(tmp_path / "text")
    trainer = build(
        "llama",
        data={"train_data_path": str(tmp_path / "text"), "split": "999,1,0", "dataloader": "engine"},
        training={"global_batch_size": 4},
    )
    request = {"trainer": msgspec.to_builtins(trainer), "folder": str(tmp_path), "counts": {}}
    code = ORDER_CODE.replace("REQUEST", repr(json.dumps(request)), 1)
    caught = code.replace("own = order", "import traceback\ntry: own = order", 1).partition("\nshares")[0]
    printed = run_code(caught + "\nexcept Exception as error: print(type(error).__name__, error)\n")
    assert "UsageError split: 999,1,0: Megatron gives validation none of the 50 documents of " in printed


ALONE = """
import json, torch, torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as buffers
buffer, other = torch.arange(4.0), torch.zeros(4)
def list_exchanges(output):
    with torch.profiler.profile() as found:
        buffers.dist_reduce_scatter_func(output, buffer, group=dist.group.WORLD)
        buffers.dist_all_gather_func(output, buffer, group=dist.group.WORLD)
    return [event.key for event in found.key_averages() if event.key.startswith("c10d::")]
print(json.dumps([list_exchanges(buffer), len(list_exchanges(other)), buffer.tolist(), other.tolist()]))
"""


def test_one_process_copies_its_gradients_nowhere() -> None:
    alone, num_exchanges, buffer, other = json.loads(run_code(ALONE).splitlines()[-1])
    assert alone == [] and num_exchanges == 2
    assert buffer == other == [0.0, 1.0, 2.0, 3.0]
