"""One optimizer step of the JAX engine as a compiled function of its state and a global batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from primus.config.schema import OptimizerConfig
from primus.frameworks.jax.engine.model import IGNORED_TARGET, ModelSettings, Weights, compute_loss_sum
from primus.frameworks.jax.engine.stacking import is_stacked


class TrainState(NamedTuple):
    """What a step changes."""

    weights: dict[str, Array]
    """Float32 masters, see `model.Weights`."""
    optimizer: optax.OptState


class StepNumbers(NamedTuple):
    """Outcome of a step, still on the device."""

    loss: Array
    """Mean over the tokens with a target."""
    grad_norm: Array
    """Norm of the whole gradient before clipping."""
    skipped: Array
    """Whether loss or gradient were not finite: the state is as before."""


StepFunction = Callable[[TrainState, Array, Array, Array], tuple[TrainState, StepNumbers]]
"""(state, tokens [M, B, S], targets [M, B, S], learning rate) -> new state and numbers."""


def build_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) at learning rate 1; matrices decay, norms and biases do not."""
    return optax.chain(
        optax.scale_by_adam(config.adam_beta1, config.adam_beta2, config.adam_eps),
        optax.add_decayed_weights(config.weight_decay, mask=find_decayed_weights),
    )


def build_step(settings: ModelSettings, optimizer: optax.GradientTransformation, clip_grad: float) -> StepFunction:
    """The step, compiled on its first call for the shapes that it is given."""

    # The old state is donated: its memory holds the new one.
    @partial(jax.jit, donate_argnums=0)
    def take_step(
        state: TrainState, tokens_MBS: Array, targets_MBS: Array, learning_rate: Array
    ) -> tuple[TrainState, StepNumbers]:
        num_targets = jnp.maximum((targets_MBS != IGNORED_TARGET).sum(), 1).astype(jnp.float32)
        loss_sum, gradients = _accumulate_gradients(state.weights, tokens_MBS, targets_MBS, 1.0 / num_targets, settings)
        loss = loss_sum / num_targets
        grad_norm = compute_norm(gradients)
        # A gradient within the limit is divided by exactly 1, so that clipping changes none of its bits.
        divisor = jnp.maximum(grad_norm / clip_grad, 1.0) if clip_grad else jnp.ones(())
        clipped = jax.tree.map(lambda gradient: gradient / divisor, gradients)
        updates, moments = optimizer.update(clipped, state.optimizer, state.weights)
        weights = jax.tree.map(lambda weight, update: weight - learning_rate * update, state.weights, updates)
        # Decided on the device: the host would have to wait for the step before it starts the next one.
        skipped = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
        kept = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), state, TrainState(weights, moments))
        return kept, StepNumbers(loss, grad_norm, skipped)

    return take_step


def build_evaluation(settings: ModelSettings) -> Callable[[Weights, Array, Array], tuple[Array, Array]]:
    """(weights, tokens [B, S], targets [B, S]) -> sum of the losses and number of targets, compiled."""

    @jax.jit
    def evaluate_batch(weights: Weights, tokens_BS: Array, targets_BS: Array) -> tuple[Array, Array]:
        return compute_loss_sum(weights, tokens_BS, targets_BS, settings), (targets_BS != IGNORED_TARGET).sum()

    return evaluate_batch


def compute_norm(gradients: Weights) -> Array:
    """The 2-norm of all gradients together.

    Rows are summed before they are added up: one float32 sum over a whole matrix loses digits.
    """
    totals = [jnp.square(gradient).sum(-1).sum() for gradient in gradients.values()]
    return jnp.sqrt(jnp.stack(totals).sum())


def find_decayed_weights(weights: Weights) -> dict[str, bool]:
    """Whether weight decay applies to each array: to matrices, not to vectors of layers."""
    return {name: value.ndim - is_stacked(name) >= 2 for name, value in weights.items()}


def _accumulate_gradients(
    weights: dict[str, Array], tokens_MBS: Array, targets_MBS: Array, scale: Array, settings: ModelSettings
) -> tuple[Array, dict[str, Array]]:
    """Summed loss, and gradients of scale x the summed loss, added up over the micro batches."""

    def compute_scaled_loss(weights: dict[str, Array], tokens_BS: Array, targets_BS: Array) -> tuple[Array, Array]:
        # One scale for all micro batches, of the targets of the whole batch: a mean of means would weigh the tokens
        # of a micro batch with few targets more.
        loss_sum = compute_loss_sum(weights, tokens_BS, targets_BS, settings)
        return scale * loss_sum, loss_sum

    def compute_gradients(tokens_BS: Array, targets_BS: Array) -> tuple[Array, dict[str, Array]]:
        (_, loss_sum), gradients = jax.value_and_grad(compute_scaled_loss, has_aux=True)(weights, tokens_BS, targets_BS)
        return loss_sum, gradients

    def add_micro_batch(
        total: tuple[Array, dict[str, Array]], batch: tuple[Array, Array]
    ) -> tuple[tuple[Array, dict[str, Array]], None]:
        return jax.tree.map(jnp.add, total, compute_gradients(*batch)), None

    # Without the scan, whose total is one more copy of all gradients in memory.
    if tokens_MBS.shape[0] == 1:
        return compute_gradients(tokens_MBS[0], targets_MBS[0])
    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, weights))
    return jax.lax.scan(add_micro_batch, zeros, (tokens_MBS, targets_MBS))[0]
