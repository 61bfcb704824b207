"""Losses of completions that a policy has generated, with the advantages of their rewards.

Shape suffixes: B batch, S sequence, T counted tokens, D model width, V vocabulary, G groups, N completions of a group.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from primus.data.instruction.policy_settings import POLICY_FORMULAS, PolicySettings
from primus.frameworks.native.engine.loss import IGNORED, count_targets
from primus.frameworks.native.engine.pipeline import Batch
from primus.frameworks.native.engine.post_training.token_scores import compute_token_scores

SPREAD_EPSILON = 1e-4
"""Added to the standard deviation of a group (trl, `GRPOTrainer`); the papers name none."""
SUMS = ("tokens", "entropy", "kl", "clipped", "mismatch_kl")
"""What a loss adds up over the tokens that it counts."""


@dataclass(frozen=True)
class RolloutBatch:
    """What a micro batch knows of its completions besides their tokens."""

    advantages_B: Tensor
    """float64."""
    log_probabilities_BS: Tensor
    """Of the tokens when they were drawn, float64; 0 where nothing is counted."""
    reference_BS: Tensor | None
    """Under the reference; None without one."""
    is_first_update: bool
    """Whether the weights are still those that generated them."""


class PolicyLoss:
    """The loss of a micro batch of completions, in place of the cross-entropy of a model.

    Args:
        kind: One of `POLICY_FORMULAS`.
        settings: How the policy is trained.
        device: Of the model.
    """

    def __init__(self, kind: str, settings: PolicySettings, device: torch.device) -> None:
        formula = POLICY_FORMULAS[kind]
        self.kind, self.max_new_tokens, self.temperature = kind, settings.max_new_tokens, settings.temperature
        self.kl_beta = formula.kl_beta if settings.kl_beta is None else settings.kl_beta
        self.clip_low = formula.clip_low if settings.clip_low is None else settings.clip_low
        self.clip_high = formula.clip_high if settings.clip_high is None else settings.clip_high
        self.batches: deque[RolloutBatch] = deque()
        """Of the passes that follow, in their order."""
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(
        self, hidden_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, scale: Tensor | None, _: Tensor | None
    ) -> Tensor:
        """`scale` x the sum of the losses of the completions, or with dapo of their tokens; float64."""
        batch, is_counted_BS = self.batches.popleft(), targets_BS != IGNORED
        scores = compute_token_scores(hidden_BSD[is_counted_BS], weight_VD, targets_BS[is_counted_BS], self.temperature)
        row_T = is_counted_BS.nonzero()[:, 0]
        drawn_T = batch.log_probabilities_BS[is_counted_BS]
        reference_T = None if batch.reference_BS is None else batch.reference_BS[is_counted_BS]
        log_T = scores.log_probabilities_T.double()
        # The first ratio is 1 whatever the rounding of generation is, which `mismatch_kl` reports.
        old_T = log_T.detach() if batch.is_first_update else drawn_T
        loss = self.compute_loss(log_T, old_T, reference_T, batch.advantages_B, row_T)
        if torch.is_grad_enabled():
            self._add_metrics(log_T.detach(), old_T, reference_T, batch.advantages_B, row_T)
            self._sums[SUMS.index("entropy")] += scores.entropies_T.double().sum()
            if batch.is_first_update:
                self._add_mismatch(scores.plain_T.double() - drawn_T)
        return loss if scale is None else loss * scale

    def compute_loss(
        self, log_T: Tensor, old_T: Tensor, reference_T: Tensor | None, advantages_B: Tensor, row_T: Tensor
    ) -> Tensor:
        """The sum of the losses of completions, or with dapo of tokens: see `POLICY_FORMULAS`.

        Args:
            log_T: Log-probabilities of the tokens.
            old_T: Those before the updates.
            reference_T: Those under the reference; None without one.
            advantages_B: Of each completion.
            row_T: The completion of each token.
        """
        lengths_B = torch.bincount(row_T, minlength=len(advantages_B)).clamp_min(1).double()
        ratio_T = self._compute_ratios(log_T - old_T, row_T, lengths_B)
        losses_T = -self._clip(ratio_T, advantages_B[row_T])
        if reference_T is not None:
            losses_T = losses_T + self.kl_beta * estimate_kl(reference_T - log_T)
        if self.kind == "dapo":
            return losses_T.sum()
        if self.kind == "dr_grpo":
            return losses_T.sum() / self.max_new_tokens
        return (_sum_by_row(losses_T, row_T, advantages_B) / lengths_B).sum()

    def count_units(self, batch: Batch) -> Tensor:
        """What the mean loss of a micro batch is over: its completions, or with dapo their tokens."""
        targets_BS = batch[1]
        return count_targets(targets_BS) if self.kind == "dapo" else (targets_BS != IGNORED).any(1).sum()

    def take_metrics(self) -> tuple[Tensor, Tensor]:
        """SUMS, and the largest difference of log-probabilities between generation and training, since the last
        call."""
        found = self._sums, self._largest
        self._sums, self._largest = torch.zeros_like(self._sums), torch.zeros_like(self._largest)
        return found

    def _compute_ratios(self, log_ratio_T: Tensor, row_T: Tensor, lengths_B: Tensor) -> Tensor:
        """Of the probabilities of each token; of gspo the geometric mean over its completion."""
        if self.kind == "gspo":
            log_ratio_T = (_sum_by_row(log_ratio_T, row_T, lengths_B) / lengths_B)[row_T]
        return log_ratio_T.exp()

    def _clip(self, ratio_T: Tensor, advantage_T: Tensor) -> Tensor:
        clipped_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
        return torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)

    def _add_metrics(
        self, log_T: Tensor, old_T: Tensor, reference_T: Tensor | None, advantages_B: Tensor, row_T: Tensor
    ) -> None:
        lengths_B = torch.bincount(row_T, minlength=len(advantages_B)).clamp_min(1).double()
        ratio_T, advantage_T = self._compute_ratios(log_T - old_T, row_T, lengths_B), advantages_B[row_T]
        is_clipped_T = self._clip(ratio_T, advantage_T) < ratio_T * advantage_T
        self._sums[SUMS.index("tokens")] += len(log_T)
        self._sums[SUMS.index("clipped")] += is_clipped_T.sum()
        if reference_T is not None:
            self._sums[SUMS.index("kl")] += estimate_kl(reference_T - log_T).sum()

    def _add_mismatch(self, difference_T: Tensor) -> None:
        self._sums[SUMS.index("mismatch_kl")] += estimate_kl(difference_T).sum()
        if len(difference_T):
            self._largest = torch.maximum(self._largest, difference_T.abs().max())


def compute_advantages(rewards_GN: Tensor, is_scaled: bool) -> Tensor:
    """Advantage of each completion over the others of its prompt; the standard deviation is that of a sample."""
    centred_GN = rewards_GN - rewards_GN.mean(1, keepdim=True)
    return centred_GN / (rewards_GN.std(1, keepdim=True) + SPREAD_EPSILON) if is_scaled else centred_GN


def estimate_kl(difference_T: Tensor) -> Tensor:
    """KL(p || q) of each token that p has drawn, from log q - log p: exp(d) - d - 1 (J. Schulman's k3)."""
    return difference_T.exp() - difference_T - 1


def _sum_by_row(values_T: Tensor, row_T: Tensor, like_B: Tensor) -> Tensor:
    return torch.zeros_like(like_B).index_add(0, row_T, values_T)
