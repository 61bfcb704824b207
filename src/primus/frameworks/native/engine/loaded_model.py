"""A model with the weights of a checkpoint, to compute with and not to train.

Shape suffixes: B batch, S sequence, D model width, V vocabulary, N counted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec, Trainer
from primus.data.training.masks import build_document_handling
from primus.frameworks.native.engine.batch import to_batch
from primus.frameworks.native.engine.loss import count_targets
from primus.frameworks.native.engine.model import Transformer, load_weights
from primus.frameworks.native.engine.moe import apply_router_settings
from primus.frameworks.native.engine.ops import choose_wide_dtype
from primus.frameworks.native.engine.post_training.generate import Generation, Sampling, generate
from primus.frameworks.native.router_settings import RouterSettings
from primus.frameworks.native.support import read_own_settings
from primus.frameworks.native.training_settings import TrainingSettings

LOGITS_BYTES = 64 << 20
"""Memory of the logits of a score that are computed at once."""


class TokenScores(NamedTuple):
    """What a model says of the counted tokens of a text."""

    log_probabilities: NDArray[np.float64]
    is_likeliest: NDArray[np.bool_]
    """Whether greedy generation would take the token."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is asked."""

    model: Transformer
    device: torch.device

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        ends: Collection[int] = (),
        is_end: Callable[[Sequence[int]], bool] = lambda _: False,
    ) -> Generation:
        """See `post_training.generate.generate`."""
        sampling = Sampling(temperature, top_k, top_p, seed)
        return generate(self.model, prompts, max_new_tokens, sampling, ends, is_end)

    @torch.no_grad()
    def score(self, tokens: Sequence[Sequence[int]], is_counted: Sequence[Sequence[bool]]) -> list[TokenScores]:
        """Log-probabilities of the counted tokens of a batch of texts, each after the tokens before it.

        Args:
            tokens: Token ids of each text, of any lengths.
            is_counted: Which of them; the first one has nothing before it.
        """
        width = max(map(len, tokens))
        tokens_BS = torch.tensor([[*row, *([0] * (width - len(row)))] for row in tokens], device=self.device)
        hidden_BSD = self.model(tokens_BS[:, :-1])
        found = []
        for hidden_SD, ids_S, counted in zip(hidden_BSD, tokens_BS[:, 1:], is_counted, strict=True):
            places_N = torch.tensor(np.flatnonzero(np.asarray(counted)[1:]), device=self.device)
            found.append(self._score_places(hidden_SD[places_N], ids_S[places_N]))
        return found

    def _score_places(self, hidden_ND: Tensor, ids_N: Tensor) -> TokenScores:
        scores, likeliest = [hidden_ND.new_zeros(0, dtype=torch.float64)], [ids_N.new_zeros(0, dtype=torch.bool)]
        chunk = max(1, LOGITS_BYTES // (self.model.spec.vocab_size * 4))
        for hidden, ids in zip(hidden_ND.split(chunk), ids_N.split(chunk), strict=True):
            logits = self.model.compute_logits(hidden)
            logits = logits.to(choose_wide_dtype(logits.dtype))
            chosen = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
            scores.append(chosen.double() - logits.logsumexp(1).double())
            likeliest.append(logits.argmax(1) == ids)
        return TokenScores(torch.cat(scores).cpu().numpy(), torch.cat(likeliest).cpu().numpy())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[NDArray[np.int64]], trainer: Trainer, eod_id: int | None) -> tuple[float, int]:
        """Sum of the losses, and their number, over micro batches of a run, computed as the run evaluates them.

        Args:
            batches: Micro batches [B, S + 1], or of instruction data [B, 3, S + 1].
            trainer: The settings of the run.
            eod_id: The end-of-document token of its data, if it is known.
        """
        model, masked = self.model, eod_id if trainer.data.eod_mask_loss else None
        if trainer.framework == "native":
            model.configure(trainer.training, read_own_settings(trainer, TrainingSettings))
            apply_router_settings(model, read_own_settings(trainer, RouterSettings))
        else:
            model.configure(trainer.training)
        model.documents = build_document_handling(trainer.data, eod_id)
        one = torch.ones((), dtype=torch.float64, device=self.device)
        loss, num_tokens = torch.zeros_like(one), 0
        for batch in batches:
            tokens, targets, *examples = to_batch(batch, masked, self.device)
            num_tokens += int(count_targets(targets))
            loss += model(tokens, targets, one, *examples)
        return loss.item(), num_tokens


@torch.no_grad()
def compute_logits(spec: ModelSpec, weights: WeightReader, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of a model with weights in hub names, float32 on the CPU.

    Raises:
        UsageError: native does not support this model.
    """
    model = load_model(spec, weights, "cpu").model
    return model.compute_logits(model(tokens_BS))


def load_model(spec: ModelSpec, weights: WeightReader, device: torch.device | str | None = None) -> LoadedModel:
    """A model in float32, with weights in hub names, on a GPU if there is one.

    Raises:
        UsageError: native does not support this model.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.device("meta"):
        model = Transformer(spec)
    model.to_empty(device=device)
    load_weights(model, weights)
    return LoadedModel(model, device)
