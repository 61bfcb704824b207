"""Losses of pairs of answers, of which one is preferred, and the reference's log-probabilities of the answers.

A pair is two examples of a packed sequence, which do not see each other: the chosen answer has the number 2 n + 1, the
rejected one 2 n + 2, where n counts the pairs of the data.

Shape suffixes: B batch, S sequence, T counted tokens, D model width, V vocabulary, E examples, P pairs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from primus.data.instruction.preference_settings import FORMULAS, PreferenceSettings
from primus.frameworks.native.engine.loss import IGNORED
from primus.frameworks.native.engine.pipeline import Batch
from primus.frameworks.native.engine.post_training.token_scores import compute_token_scores

METRICS = (
    "margin",
    "accuracy",
    "reward_chosen",
    "reward_rejected",
    "log_probability_chosen",
    "log_probability_rejected",
)


class PreferenceLoss:
    """The loss of a micro batch of pairs, in place of the cross-entropy of a model.

    Args:
        settings: Which loss.
        device: Of the model.
    """

    def __init__(self, settings: PreferenceSettings, device: torch.device) -> None:
        self.kind, self.gamma = settings.loss, settings.gamma
        self.beta = FORMULAS[settings.loss].beta if settings.beta is None else settings.beta
        self.reference_E: Tensor | None = None
        """Log-probability of each answer under the reference, in the order of the data; float64."""
        self.is_scoring = False
        """Whether passes fill `reference_E` instead of computing the loss."""
        self._sums = torch.zeros(len(METRICS) + 1, dtype=torch.float64, device=device)

    @torch.compiler.disable
    def __call__(
        self, hidden_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, scale: Tensor | None, examples_BS: Tensor
    ) -> Tensor:
        """`scale` x the sum of the losses of the pairs, float64."""
        numbers_E, sums_E, counts_E = sum_log_probabilities(hidden_BSD, weight_VD, targets_BS, examples_BS)
        if self.is_scoring:
            assert self.reference_E is not None
            self.reference_E[numbers_E] = sums_E
            return sums_E.sum()
        reference_E = torch.zeros_like(sums_E) if self.reference_E is None else self.reference_E[numbers_E]
        sums_P2, counts_P2, reference_P2 = (each.view(-1, 2) for each in (sums_E, counts_E, reference_E))
        losses_P = self.compute_losses(sums_P2, counts_P2, reference_P2)
        self._add_metrics(sums_P2.detach(), counts_P2, reference_P2)
        return losses_P.sum() if scale is None else losses_P.sum() * scale

    def compute_losses(self, sums_P2: Tensor, counts_P2: Tensor, reference_P2: Tensor) -> Tensor:
        """See `FORMULAS`; all are [P, 2]: of the chosen, and of the rejected answer."""
        means_P2, ratios_P2 = sums_P2 / counts_P2, sums_P2 - reference_P2
        if self.kind == "dpo":
            return -F.logsigmoid(self.beta * _subtract(ratios_P2))
        if self.kind == "ipo":
            return (_subtract(ratios_P2 / counts_P2) - 1 / (2 * self.beta)) ** 2
        if self.kind == "simpo":
            return -F.logsigmoid(self.beta * _subtract(means_P2) - self.gamma)
        log_odds_P2 = means_P2 - torch.log1p(-means_P2.exp())
        return -means_P2[:, 0] - self.beta * F.logsigmoid(_subtract(log_odds_P2))

    def take_metrics(self) -> Tensor:
        """Sums of METRICS since the last call, and the number of pairs."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def _add_metrics(self, sums_P2: Tensor, counts_P2: Tensor, reference_P2: Tensor) -> None:
        """Rewards as in the papers: beta x log-ratio to the reference; without one, beta x mean log-probability."""
        is_relative = FORMULAS[self.kind].needs_reference
        rewards_P2 = self.beta * (sums_P2 - reference_P2 if is_relative else sums_P2 / counts_P2)
        margins_P = _subtract(rewards_P2)
        values = (
            margins_P,
            (margins_P > 0).double(),
            *rewards_P2.unbind(1),
            *sums_P2.unbind(1),
            torch.ones_like(margins_P),
        )
        self._sums += torch.stack([each.sum() for each in values])


def count_pairs(batch: Batch) -> Tensor:
    """Pairs of a micro batch: where the number of a chosen answer, which is odd, begins."""
    numbers_BS = batch[2]
    before_BS = F.pad(numbers_BS[:, :-1], (1, 0))
    return ((numbers_BS % 2 == 1) & (numbers_BS != before_BS)).sum()


def sum_log_probabilities(
    hidden_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, examples_BS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each answer of a micro batch: its number from 0, the sum of log p of its tokens, and how many they are."""
    is_counted_BS = targets_BS != IGNORED
    hidden_TD, targets_T = hidden_BSD[is_counted_BS], targets_BS[is_counted_BS]
    log_probabilities_T = compute_token_scores(hidden_TD, weight_VD, targets_T).log_probabilities_T
    # The same pair may be in two sequences of a batch.
    row_BS = torch.arange(len(examples_BS), device=examples_BS.device).unsqueeze(1).expand_as(examples_BS)
    keys_T2 = torch.stack((row_BS, examples_BS), -1)[is_counted_BS]
    keys_E2, index_T = keys_T2.unique(dim=0, return_inverse=True)
    sums_E = torch.zeros(len(keys_E2), dtype=torch.float64, device=hidden_TD.device)
    sums_E = sums_E.index_add(0, index_T, log_probabilities_T.double())
    return keys_E2[:, 1] - 1, sums_E, torch.bincount(index_T, minlength=len(keys_E2))


def combine_scores(scores_E: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The scores that any process has computed; -inf where none has."""
    if group is not None:
        dist.all_reduce(scores_E, dist.ReduceOp.MAX, group)
    return scores_E


def _subtract(values_P2: Tensor) -> Tensor:
    return values_P2[:, 0] - values_P2[:, 1]
