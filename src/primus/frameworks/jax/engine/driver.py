"""The JAX engine: one optimizer step at a time on all devices of this process, or of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from primus.checkpoint.family import list_hub_shapes
from primus.checkpoint.weights import WeightReader
from primus.config.exports.hugging_face import format_model_config
from primus.config.schema import Trainer
from primus.data.training.masks import build_document_handling, split_inputs_and_targets
from primus.errors import PrimusError, UsageError
from primus.frameworks.jax.engine.model import ModelSettings
from primus.frameworks.jax.engine.settings_in_force import OptimizerProbe, read_settings
from primus.frameworks.jax.engine.sharding import DATA, JaxLayout, choose_residual_sharding, shard_batch, shard_weight
from primus.frameworks.jax.engine.stacking import Shapes, group_names, is_stacked, stack_shapes
from primus.frameworks.jax.engine.step import TrainState, build_evaluation, build_optimizer, build_step
from primus.runs.files import write_text
from primus.session.checkpoints import array_files
from primus.session.engine import Engine, StepValues
from primus.session.ranks.jax_processes import read_peak_memory
from primus.session.settings.settings_in_force import LiveSetting


class JaxEngine(Engine):
    """Implements `primus.session.engine.Engine`.

    Args:
        trainer: What to train.
        layout: The devices.
        eod_id: Token that ends a document; None if the data has none.
    """

    def __init__(self, trainer: Trainer, layout: JaxLayout, eod_id: int | None = None) -> None:
        self._trainer = trainer
        training, parallel = trainer.training, trainer.parallel
        # Products of float32 matrices use fewer bits by default on accelerators (jax.default_matmul_precision).
        jax.config.update("jax_default_matmul_precision", None if training.bf16 else "highest")
        self._layout, self._mesh = layout, layout.mesh
        self._check_batch()
        self._masked_token = eod_id if trainer.data.eod_mask_loss else None
        self._settings = settings = ModelSettings(
            spec=trainer.model,
            compute_dtype=jnp.dtype(jnp.bfloat16 if training.bf16 else jnp.float32),
            recompute=training.recompute_activations,
            loss_chunk_size=training.loss_chunk_size,
            documents=build_document_handling(trainer.data, eod_id),
            residual_sharding=choose_residual_sharding(self._mesh, parallel),
        )
        self._optimizer = build_optimizer(trainer.optimizer)
        self._step = build_step(settings, self._optimizer, trainer.optimizer.clip_grad)
        self._evaluate = build_evaluation(settings)
        self._shapes = list_hub_shapes(trainer.model)
        self._groups = group_names(self._shapes)
        self._shardings = {
            key: shard_weight(key, shape, self._mesh, parallel.use_distributed_optimizer)
            for key, shape in stack_shapes(self._shapes).items()
        }
        self._state: TrainState | None = None
        self._last_inputs: tuple[Array, ...] = ()
        self._probe = OptimizerProbe(self._optimizer, trainer.optimizer.adam_eps, self._get_state)

    @property
    def data_rank(self) -> int:
        return self._layout.data_rank

    @property
    def model(self) -> dict[str, Array]:
        """The weights, for callbacks."""
        return self.weights

    @property
    def optimizer(self) -> optax.OptState:
        """The optimizer's state, for callbacks."""
        return self._get_state().optimizer

    @property
    def weights(self) -> dict[str, Array]:
        """See `model.Weights`."""
        return self._get_state().weights

    def step(self, batches: Sequence[NDArray[np.int64]], learning_rate: float) -> StepValues:
        tokens, targets = self._place_batches(batches)
        self._last_inputs = (tokens, targets, jnp.float32(learning_rate))
        with jax.set_mesh(self._mesh):
            self._state, numbers = self._step(self._get_state(), *self._last_inputs)
        # Reading the values waits for the step.
        loss, grad_norm, skipped = (value.item() for value in jax.device_get(numbers))
        return StepValues(loss=loss, grad_norm=grad_norm, skipped=skipped)

    def evaluate(self, batches: Sequence[NDArray[np.int64]]) -> tuple[float, int]:
        total_loss, total_tokens = 0.0, 0
        weights = self._get_state().weights
        for batch in batches:
            tokens, targets = self._place_batches([batch])
            with jax.set_mesh(self._mesh):
                loss, num_tokens = jax.device_get(self._evaluate(weights, tokens[0], targets[0]))
            total_loss, total_tokens = total_loss + loss.item(), total_tokens + num_tokens.item()
        return total_loss, total_tokens

    def watch_step(self) -> AbstractContextManager[object]:
        return self._probe

    def read_settings(self) -> list[LiveSetting]:
        with jax.set_mesh(self._mesh):
            # JAX keeps the trace of the first call.
            step = self._step.trace(self._get_state(), *self._last_inputs).jaxpr  # type: ignore[attr-defined]
        return read_settings(self._get_state(), self._probe, step, self._mesh)

    def load_weights(self, weights: WeightReader) -> None:
        _check_shapes({name: info.shape for name, info in weights.list_tensors().items()}, self._shapes)
        self._start(
            {key: self._place_weights(key, lambda name: weights.read(name).float().numpy()) for key in self._groups}
        )

    def save(self, folder: Path) -> None:
        state, is_writer = self._get_state(), self._layout.process == 0
        files = {
            folder / array_files.WEIGHTS_FILE: self._split_weights(state.weights),
            folder / array_files.OPTIMIZER_FILE: self._list_moments(state),
        }
        array_files.save_arrays(files, is_writer)
        if is_writer:
            # With it the folder is one that Hugging Face's libraries load.
            write_text(folder / array_files.CONFIG_FILE, format_model_config(self._trainer.model).text)

    def load(self, folder: Path) -> None:
        arrays = array_files.open_arrays(folder / array_files.WEIGHTS_FILE)
        _check_shapes({name: array.shape for name, array in arrays.items()}, self._shapes)
        self._start({key: self._place_weights(key, arrays.__getitem__) for key in self._groups})
        self._state = TrainState(
            self.weights, self._read_moments(array_files.open_arrays(folder / array_files.OPTIMIZER_FILE))
        )

    def read_memory(self) -> int:
        return read_peak_memory()

    def close(self) -> None:
        self._state = None

    def _get_state(self) -> TrainState:
        assert self._state is not None, "load_weights or load comes first"
        return self._state

    def _start(self, weights: dict[str, Array]) -> None:
        """Begin at step 0 with `weights`; the moments are sharded as their weights."""
        with jax.set_mesh(self._mesh):
            moments = jax.jit(self._optimizer.init)(weights)
        self._state = TrainState(weights, self._shard_moments(moments))

    def _shard_moments(self, moments: optax.OptState) -> optax.OptState:
        replicated = NamedSharding(self._mesh, PartitionSpec())

        def place_moment(path: tuple, value: Array) -> Array:
            return jax.device_put(value, self._shardings.get(_find_weight_name(path), replicated))

        return jax.tree_util.tree_map_with_path(place_moment, moments)

    def _place_weights(self, key: str, read: Callable[[str], NDArray]) -> Array:
        """An array of `self._groups` on its devices, from weights by Hugging Face name.

        Each process copies its own parts only.
        """
        names, shape = self._groups[key], stack_shapes(self._shapes)[key]

        def read_part(index: tuple[slice, ...]) -> NDArray:
            if not is_stacked(key):
                return read(names[0])[index]
            return np.stack([read(name)[index[1:]] for name in names[index[0]]])

        return jax.make_array_from_callback(shape, self._shardings[key], read_part)

    def _split_weights(self, weights: dict[str, Array]) -> dict[str, array_files.ArraySource]:
        """Every weight by its Hugging Face name."""
        return {
            name: array_files.ArraySource(weights[key], (layer,) if is_stacked(key) else ())
            for key, names in self._groups.items()
            for layer, name in enumerate(names)
        }

    def _place_batches(self, batches: Sequence[NDArray[np.int64]]) -> tuple[Array, Array]:
        """Tokens and targets [M, B, S] of all processes, from the micro batches of this one."""
        inputs, targets = split_inputs_and_targets(np.stack(batches), self._masked_token)
        sharding = shard_batch(self._mesh)
        shape = (inputs.shape[0], inputs.shape[1] * self._layout.data_size, inputs.shape[2])
        tokens, wanted = (
            jax.make_array_from_process_local_data(sharding, np.ascontiguousarray(part, np.int32), shape)
            for part in (inputs, targets)
        )
        return tokens, wanted

    def _check_batch(self) -> None:
        devices = self._mesh.shape[DATA] // self._layout.data_size
        size = self._trainer.training.micro_batch_size
        if size % devices:
            raise UsageError(
                f"micro_batch_size: {size} does not divide among the {devices} data-parallel devices of a process",
                f"use a multiple of {devices}",
            )

    def _list_moments(self, state: TrainState) -> dict[str, array_files.ArraySource]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(state.optimizer)
        return {_name_moment(path): array_files.ArraySource(value) for path, value in leaves}

    def _read_moments(self, arrays: dict[str, NDArray]) -> optax.OptState:
        leaves, structure = jax.tree_util.tree_flatten_with_path(self._get_state().optimizer)
        expected = {_name_moment(path): value.shape for path, value in leaves}
        _check_shapes({name: array.shape for name, array in arrays.items()}, expected)

        def read_moment(path: tuple, value: Array) -> Array:
            array = arrays[_name_moment(path)]
            return jax.make_array_from_callback(value.shape, value.sharding, lambda index: array[index])

        return jax.tree_util.tree_unflatten(structure, [read_moment(path, value) for path, value in leaves])


def _find_weight_name(path: tuple) -> str:
    """The weight that a leaf of the optimizer's state belongs to; empty for a counter."""
    last = path[-1]
    return str(last.key) if isinstance(last, jax.tree_util.DictKey) else ""


def _name_moment(path: tuple) -> str:
    """Name of a leaf of the optimizer's state in a file: ``mu.model.norm.weight``, ``count``."""
    parts = [part.name if isinstance(part, jax.tree_util.GetAttrKey) else "" for part in path]
    return ".".join(filter(None, [*parts, _find_weight_name(path)]))


def _check_shapes(found: Shapes, expected: Shapes) -> None:
    """Raises PrimusError unless both have the same names and shapes."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise PrimusError(f"the checkpoint lacks {name}", "load a checkpoint of this model")
        if name not in expected:
            raise PrimusError(f"the checkpoint has {name}, which the model does not have", "load one of this model")
        if tuple(found[name]) != tuple(expected[name]):
            raise PrimusError(
                f"{name} has shape {list(found[name])} in the checkpoint and {list(expected[name])} in the model",
                "load a checkpoint of this model",
            )
