"""The settings in force of a run of JAX, read from its arrays, its traced step and a probe of its optimizer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from primus.frameworks.jax.engine.sharding import DATA, TENSOR
from primus.frameworks.jax.engine.step import TrainState, find_decayed_weights
from primus.session.settings.settings_in_force import APPLIED_NORM, LiveSetting

PRODUCT = "dot_general"
LOSS_PRODUCTS = 3
"""Products of a chunk of the loss, forward and backward; a recomputed layer has more."""
PROBE_TOLERANCE = 1e-3
"""Relative, of a number that float32 arithmetic shows."""


def read_settings(state: TrainState, probe: OptimizerProbe, step: Any, mesh: Mesh) -> list[LiveSetting]:
    """The settings that the objects of the engine have after its first step.

    Args:
        state: After it.
        probe: Of the optimizer that has updated the state.
        step: Its jaxpr.
        mesh: The devices.
    """
    weights = state.weights
    sizes, decays = {name: math.prod(each.shape) for name, each in weights.items()}, find_decayed_weights(weights)
    found = {
        "parameters": sum(sizes.values()),
        "parameter_dtype": ", ".join(sorted({str(each.dtype) for each in weights.values()})),
        "moment_dtype": ", ".join(sorted({str(each.dtype) for each in jax.tree.leaves(state.optimizer) if each.ndim})),
        "vocab_rows": weights["model.embed_tokens.weight"].shape[0],
        "decayed_parameters": sum(size for name, size in sizes.items() if decays[name]),
        "undecayed_parameters": sum(size for name, size in sizes.items() if not decays[name]),
        "optimizer_class": type(_get_moments(state.optimizer)).__qualname__,
        "compile": True,
        "sharding": " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        "tensor_model_parallel_size": mesh.shape[TENSOR],
        "deterministic": "xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", ""),
        **dict(_read_trace(step)),
    }
    if mesh.shape[DATA] > 1:  # else there is nothing to shard
        found["use_distributed_optimizer"] = any(DATA in str(each.sharding) for each in weights.values())
    return [
        *(LiveSetting(key=key, value=value) for key, value in found.items()),
        *probe.measure(state),
    ]


def _read_trace(step: Any) -> Iterator[tuple[str, Any]]:
    """What the traced step computes: the types of its matrix products, and what is recomputed."""
    equations = list(_list_equations(step))
    narrow = [_get_operand_type(each) == jnp.bfloat16 for each in equations if each.primitive.name == PRODUCT]
    yield "bf16", all(narrow) if all(narrow) or not any(narrow) else sum(narrow) > len(narrow) / 2
    yield (
        "recompute_activations",
        any(
            sum(inner.primitive.name == PRODUCT for inner in _list_equations(each.params["jaxpr"])) > LOSS_PRODUCTS
            for each in equations
            if each.primitive.name in ("remat2", "checkpoint")
        ),
    )


def _list_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those inside of it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    yield from _list_equations(inner)


def _get_operand_type(equation: Any) -> Any:
    return equation.invars[0].aval.dtype


class OptimizerProbe(AbstractContextManager["OptimizerProbe"]):
    """Measures the numbers of an optimizer, which optax keeps in closures, by its update of two weights of 1.

    The measurement is a compiled function of its own. It is compiled while the first step is, in another thread: one
    after the other they would cost half a second more.

    Args:
        optimizer: Of the engine.
        asked_eps: Epsilon of Adam in the experiment, by which a gradient is chosen that shows the real one.
        get_state: Gives the state of the training when the first step begins.
    """

    def __init__(
        self, optimizer: optax.GradientTransformation, asked_eps: float, get_state: Callable[[], TrainState]
    ) -> None:
        self._update, self._start, self._asked_eps = optimizer.update, optimizer.init, asked_eps
        self._get_state = get_state
        self._compiled: Future[Any] | None = None

    def __enter__(self) -> OptimizerProbe:
        self._inputs = jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding),
            _get_moments(self._get_state().optimizer).mu,
        )
        executor = ThreadPoolExecutor(1)
        self._compiled = executor.submit(lambda: jax.jit(self._probe).lower(self._inputs).compile())
        executor.shutdown(wait=False)
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing: the measurement follows the step."""

    def measure(self, state: TrainState) -> Iterator[LiveSetting]:
        """The numbers, after the step during which the probe was open."""
        adam = _get_moments(state.optimizer)
        assert self._compiled is not None
        # The step may have placed its results otherwise.
        moments = jax.device_put(adam.mu, jax.tree.map(lambda each: each.sharding, self._inputs))
        found = {key: value.item() for key, value in jax.device_get(self._compiled.result()(moments)).items()}
        if int(adam.count) != 1:
            del found[APPLIED_NORM]  # the moments are those of several gradients
        for key, value in found.items():
            yield LiveSetting(key=key, value=value, tolerance=PROBE_TOLERANCE)

    def _probe(self, moments: Any) -> dict[str, Array]:
        weights = {"probe.matrix": jnp.ones((1, 1)), "probe.vector": jnp.ones(1)}
        gradients = jax.tree.map(jnp.ones_like, weights)
        updates, after = self._update(gradients, self._start(weights), weights)
        # A gradient of the size of epsilon, which then halves the update.
        small = jax.tree.map(lambda one: one * self._asked_eps, gradients)
        tiny, _ = self._update(small, self._start(weights), weights)
        adam = _get_moments(after)
        squares = [jnp.square(each.astype(jnp.float32)).sum() for each in jax.tree.leaves(moments)]
        return {
            "adam_beta1": 1 - adam.mu["probe.vector"][0],
            "adam_beta2": 1 - adam.nu["probe.vector"][0],
            "adam_eps": self._asked_eps * (1 / tiny["probe.vector"][0] - 1),
            "weight_decay": updates["probe.matrix"][0, 0] - updates["probe.vector"][0],
            APPLIED_NORM: jnp.sqrt(sum(squares)) / adam.mu["probe.vector"][0],
        }


def _get_moments(state: optax.OptState) -> Any:
    """The part of the optimizer's state that has the moments."""
    (adam,) = [each for each in state if isinstance(each, optax.ScaleByAdamState)]
    return adam
