"""Log-probabilities of all answers under the reference: computed once, and kept by what they depend on."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from primus.config.schema import Trainer
from primus.data.training.dataset import Datasets
from primus.frameworks.native.engine.batch import to_batch
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.post_training.preferences import PreferenceLoss, combine_scores
from primus.runs.files import write_bytes
from primus.session.ranks.torch_processes import TorchProcesses
from primus.session.start_weights import compute_weights_fingerprint, open_base_weights

FOLDER = "instruction"


def load_reference(
    objective: PreferenceLoss,
    model: Transformer,
    data: Datasets,
    trainer: Trainer,
    processes: TorchProcesses,
    load_weights: Callable[[], None],
) -> None:
    """Give `objective` the log-probabilities of the data under the weights that the run starts from.

    They are read where the same weights, data, tokenizer, template, length and precision had them computed; else
    `load_weights` fills the model with those weights first. Every process must call this.
    """
    key = f"{compute_weights_fingerprint(open_base_weights(trainer))} {data.fingerprint} {trainer.training.seq_length}"
    digest = hashlib.sha256(f"{key} {model.compute_dtype}".encode()).hexdigest()[:32]
    path = Path(trainer.data.data_path) / FOLDER / f"reference-{digest}.npy"
    # All compute where one of them lacks the file.
    if processes.all_reduce_max(int(not path.exists())):
        load_weights()
        scores = _compute_scores(objective, model, data, trainer.training.micro_batch_size, processes)
        if processes.is_first:
            buffer = io.BytesIO()
            np.save(buffer, scores.cpu().numpy())
            write_bytes(path, buffer.getvalue())
        objective.reference_E = scores
        return
    objective.reference_E = torch.from_numpy(np.load(path, allow_pickle=False)).to(processes.device)


@torch.no_grad()
def _compute_scores(
    objective: PreferenceLoss, model: Transformer, data: Datasets, batch_size: int, processes: TorchProcesses
) -> torch.Tensor:
    axis, device = model.layout.data, processes.device
    scores_E = torch.full((data.num_examples,), -torch.inf, dtype=torch.float64, device=device)
    objective.reference_E, objective.is_scoring = scores_E, True
    try:
        for dataset in filter(None, (data.train, data.valid, data.test)):
            size, stride = dataset.samples_per_epoch, batch_size * axis.size
            # Each process has as many passes, in which a sharded model meets its weights.
            for begin in range(0, size, stride):
                numbers = [(begin + axis.rank * batch_size + place) % size for place in range(batch_size)]
                tokens, targets, examples = to_batch(np.stack([dataset[number] for number in numbers]), None, device)
                model(tokens, targets, None, examples)
    finally:
        objective.is_scoring = False
    return combine_scores(scores_E, axis.group)
