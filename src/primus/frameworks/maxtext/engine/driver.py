"""The MaxText engine: MaxText's model, optimizer and train step, one step at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax import Array
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.layers.attentions import Attention
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train as maxtext_train
from maxtext.utils import maxtext_utils, model_creation_utils, sharding, train_utils
from numpy.typing import NDArray

from primus.checkpoint.weights import WeightReader
from primus.config.exports.hugging_face import format_model_config
from primus.config.schema import Trainer
from primus.data.training.masks import compute_document_positions, split_inputs_and_targets
from primus.errors import PrimusError
from primus.frameworks.maxtext.engine.layout import MaxTextLayout
from primus.frameworks.maxtext.engine.settings_in_force import read_settings
from primus.frameworks.maxtext.engine.weights import WeightPlace, list_places
from primus.frameworks.maxtext.settings import has_hub_weights, uses_default_rope
from primus.runs.files import write_text
from primus.session.checkpoints import array_files
from primus.session.engine import Engine, StepValues
from primus.session.ranks.jax_processes import read_peak_memory
from primus.session.settings.settings_in_force import LiveSetting

MODEL = "model."
"""Prefix of the model in the names of the state."""
IGNORED_TARGET = -100


class AppliedRate:
    """The learning rate of the step that is traced: a schedule of optax that ignores its counter."""

    def __init__(self) -> None:
        self.value: Array | float = 0.0

    def __call__(self, count: Array) -> Array | float:
        return self.value


class MaxTextEngine(Engine):
    """Implements `primus.session.engine.Engine`.

    Args:
        trainer: What to train.
        config: MaxText's configuration of it.
        layout: The devices.
        eod_id: Token that ends a document; None if the data has none.
    """

    def __init__(self, trainer: Trainer, config: Any, layout: MaxTextLayout, eod_id: int | None = None) -> None:
        self._trainer, self._config, self._layout = trainer, config, layout
        self._eod_id = eod_id
        # Products of float32 matrices use fewer bits by default on accelerators (jax.default_matmul_precision).
        jax.config.update("jax_default_matmul_precision", None if trainer.training.bf16 else "highest")
        jax.config.update("jax_use_shardy_partitioner", config.shardy)
        self._has_hub_weights = has_hub_weights(trainer)
        # MaxText puts 1 / sqrt(head width) of the attention into the initial weights of queries; Adam then changes
        # them by other amounts than those of native. With the weights of primus it is a factor of the attention.
        self._scales_queries = trainer.training.init == "primus"
        self._rate = AppliedRate()
        self._state, self._shardings, graph = self._build_state()
        self._step = self._build_step(graph)
        self._evaluate = train_utils.jit_eval_step(
            config,
            graph,
            self._shardings,
            sharding.get_input_data_sharding(config, layout.mesh, rules=config.logical_axis_rules_for_eval),
            maxtext_train.eval_step,
        )

    @property
    def data_rank(self) -> int:
        return self._layout.data_rank

    @property
    def model(self) -> Any:
        """The state of the model, for callbacks."""
        return self._state.model

    @property
    def optimizer(self) -> Any:
        """The state of the optimizer, for callbacks."""
        return self._state.optimizer

    def step(self, batches: Sequence[NDArray[np.int64]], learning_rate: float) -> StepValues:
        batch = self._place_batches(batches)
        with self._enter_mesh(self._config.logical_axis_rules):
            self._state, numbers = self._step(self._state, batch, jnp.float32(learning_rate))
        # Reading the values waits for the step.
        loss, grad_norm, skipped = (value.item() for value in jax.device_get(numbers))
        return StepValues(loss=loss, grad_norm=grad_norm, skipped=skipped)

    def evaluate(self, batches: Sequence[NDArray[np.int64]]) -> tuple[float, int]:
        total_loss, total_tokens = 0.0, 0
        for each in batches:
            batch = self._place_batches([each])
            with self._enter_mesh(self._config.logical_axis_rules_for_eval):
                found = jax.device_get(self._evaluate(self._state, batch)["scalar"])
            total_loss += found["evaluation/total_loss"].item()
            total_tokens += int(found["evaluation/total_weights"].item())
        return total_loss, total_tokens

    def watch_step(self) -> AbstractContextManager[object]:
        return nullcontext()

    def read_settings(self) -> list[LiveSetting]:
        return read_settings(self._config, self._state, dict(self._layout.mesh.shape), self._trainer)

    def load_weights(self, weights: WeightReader) -> None:
        self._set_weights(lambda name: weights.read(name).float().numpy(), weights.list_tensors())

    def save(self, folder: Path) -> None:
        is_writer = jax.process_index() == 0
        arrays, files = self._list_arrays(), {}
        if self._has_hub_weights:
            weights = {name: arrays.pop(name) for name in self._list_weights()}
            files[folder / array_files.WEIGHTS_FILE] = self._split_weights(weights)
        sources = {name: array_files.ArraySource(array) for name, array in arrays.items()}
        array_files.save_arrays({**files, folder / array_files.OPTIMIZER_FILE: sources}, is_writer)
        if self._has_hub_weights and is_writer:
            # With it the folder is one that Hugging Face's libraries load.
            write_text(folder / array_files.CONFIG_FILE, format_model_config(self._trainer.model).text)

    def load(self, folder: Path) -> None:
        if self._has_hub_weights:
            weights = array_files.open_arrays(folder / array_files.WEIGHTS_FILE)
            self._set_weights(weights.__getitem__, weights)
        saved = array_files.open_arrays(folder / array_files.OPTIMIZER_FILE)
        expected = self._list_arrays()
        if self._has_hub_weights:
            expected = {name: array for name, array in expected.items() if name not in self._list_weights()}
        _check_names(saved, expected)
        self._replace({name: _place_array(array, saved[name].__getitem__) for name, array in expected.items()})

    def read_memory(self) -> int:
        return read_peak_memory()

    def close(self) -> None:
        self._state = None

    # Building

    def _build_state(self) -> tuple[Any, Any, Any]:
        """MaxText's initial state, its shardings, and the graph of its modules."""
        config, mesh = self._config, self._layout.mesh
        create, abstract_model = model_creation_utils.create_nnx_abstract_model(config, mesh)
        transformation = optimizers.get_optimizer(config, self._rate, abstract_model, mesh=mesh)

        def create_state() -> TrainStateNNX:
            model = create()
            if self._has_hub_weights and self._scales_queries:
                _scale_queries(model)
            return TrainStateNNX(model, nnx.Optimizer(model, transformation, wrt=nnx.Param))

        state, _, shardings, _, _ = maxtext_utils.setup_training_state(None, config, mesh, None, create_state)
        with logical_axis_rules(config.logical_axis_rules):
            return state, shardings, nnx.graphdef(nnx.eval_shape(create_state))

    def _build_step(self, graph: Any) -> Callable[[Any, dict[str, Array], Array], tuple[Any, tuple[Array, ...]]]:
        """MaxText's step at a learning rate; it changes nothing if loss or gradient are not finite."""
        parameters = nnx.filter_state(self._shardings.model, nnx.Param)
        train_step = functools.partial(maxtext_train.train_step, graph, self._config, self._shardings, parameters)
        keeps_old = not self._config.optimizer_memory_host_offload  # arrays of the host cannot be selected from

        def take_step(state: Any, batch: dict[str, Array], rate: Array) -> tuple[Any, tuple[Array, ...]]:
            self._rate.value = rate
            new, metrics = train_step(state, batch)
            values = metrics["scalar"]
            loss, grad_norm = values["learning/lm_loss"], values["learning/raw_grad_norm"]
            skipped = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm)) & keeps_old
            kept = jax.tree.map(functools.partial(_choose_old, skipped), state, new) if keeps_old else new
            return kept, (loss, grad_norm, skipped)

        placed = (self._shardings, self._layout.batch_sharding, None)
        # The old state is donated: its memory holds the new one.
        return jax.jit(take_step, in_shardings=placed, out_shardings=(self._shardings, None), donate_argnums=0)

    @contextmanager
    def _enter_mesh(self, rules: Any) -> Iterator[None]:
        with jax.set_mesh(self._layout.mesh), logical_axis_rules(rules):
            yield

    # Batches

    def _place_batches(self, batches: Sequence[NDArray[np.int64]]) -> dict[str, Array]:
        """The batch [B, S] of all processes as MaxText's loaders give it."""
        data = self._trainer.data
        # MaxText takes every M-th sequence for a micro batch.
        tokens = np.stack(batches, axis=1).reshape(-1, batches[0].shape[-1])
        inputs, targets = split_inputs_and_targets(tokens, self._eod_id if data.eod_mask_loss else None)
        is_counted = targets != IGNORED_TARGET
        positions = compute_document_positions(inputs, self._eod_id if data.reset_position_ids else None)
        segments = np.ones_like(inputs)
        if data.reset_attention_mask:
            ends = inputs == self._eod_id
            segments += ends.cumsum(-1) - ends
        parts = {
            "inputs": inputs,
            "inputs_position": positions,
            "inputs_segmentation": segments,
            "targets": np.where(is_counted, targets, 0),
            "targets_position": positions,
            "targets_segmentation": is_counted,
        }
        return {name: self._place_part(part.astype(np.int32)) for name, part in parts.items()}

    def _place_part(self, part: NDArray[np.int32]) -> Array:
        size = len(part)
        first = size * self._layout.data_rank

        def read_rows(index: tuple[slice, ...]) -> NDArray[np.int32]:
            start, end, _ = index[0].indices(size * self._layout.data_size)
            return part[start - first : end - first, index[1]]

        shape = (size * self._layout.data_size, part.shape[1])
        return jax.make_array_from_callback(shape, self._layout.batch_sharding, read_rows)

    # State

    def _list_arrays(self) -> dict[str, Array]:
        """Every array of the state by its name; random keys as numbers."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._state)
        return {_format_name(path): _to_numbers(leaf) for path, leaf in leaves}

    def _list_weights(self) -> dict[str, list[WeightPlace]]:
        """Parameters of the model by the names of the state, with the weights that each holds."""
        config = self._config
        leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.filter_state(self._state.model, nnx.Param))
        return {
            f"{MODEL}{_format_name(path)}": list_places(
                _format_name(path),
                leaf.shape,
                config.param_scan_axis,
                is_interleaved=not uses_default_rope(self._trainer.model),
                query_factor=self._find_query_factor(),
            )
            for path, leaf in leaves
        }

    def _find_query_factor(self) -> float:
        """What MaxText's projection of queries is, divided by that of the hub."""
        is_plain = self._config.decoder_block.value in ("llama2", "mixtral") and not self._trainer.model.qk_layernorm
        return 1.0 if self._scales_queries or not is_plain else float(self._config.head_dim) ** -0.5

    def _set_weights(self, read: Callable[[str], NDArray], given: Any) -> None:
        """Replace the parameters; `given` has the names of the source."""
        arrays, groups = self._list_arrays(), self._list_weights()
        _check_names(given, [place.hub_name for places in groups.values() for place in places])

        def read_array(name: str, index: tuple[slice, ...]) -> NDArray:
            return _read_places(groups[name], read, arrays[name].shape, index)

        self._replace({name: _place_array(arrays[name], functools.partial(read_array, name)) for name in groups})

    def _split_weights(self, arrays: dict[str, Array]) -> dict[str, array_files.ArraySource]:
        """Every weight by its name on the hub."""
        return {
            place.hub_name: array_files.ArraySource(arrays[name], place.part, place.to_hub, place.hub_shape)
            for name, places in self._list_weights().items()
            for place in places
        }

    def _replace(self, arrays: dict[str, Array]) -> None:
        """Replace arrays of the state by name."""

        def choose_array(path: tuple, old: Array) -> Array:
            new = arrays.get(_format_name(path))
            if new is None:
                return old
            is_key = jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
            return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if is_key else new

        self._state = jax.tree_util.tree_map_with_path(choose_array, self._state)


def _scale_queries(model: nnx.Module) -> None:
    """Let attention divide by the square root of its head width where MaxText leaves that to the weights."""
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Attention) and not module.use_qk_norm and module.query_pre_attn_scalar is None:
            module.query_pre_attn_scalar = float(module.head_dim) ** -0.5


def _read_places(
    places: list[WeightPlace], read: Callable[[str], NDArray], shape: tuple[int, ...], index: tuple[slice, ...]
) -> NDArray:
    """The part `index` of an array of `shape`, whose weights are read by their names."""
    bounds = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
    values = np.empty([end - start for start, end in bounds], np.float32)
    for place in places:
        axes = list(zip(place.part, bounds, strict=True))
        if all(isinstance(at, slice) or start <= at < end for at, (start, end) in axes):
            inner = tuple(each for at, each in zip(place.part, index, strict=True) if isinstance(at, slice))
            target = tuple(at if isinstance(at, slice) else at - start for at, (start, _) in axes)
            values[target] = place.to_maxtext(read(place.hub_name))[inner]
    return values


def _choose_old(skipped: Array, old: Array, new: Array) -> Array:
    """The array after a step; random keys never change."""
    return new if jnp.issubdtype(new.dtype, jax.dtypes.prng_key) else jnp.where(skipped, old, new)


def _format_name(path: tuple) -> str:
    """Name of an array of the state: ``optimizer.opt_state.0.mu.decoder.layers.mlp.wo.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def _to_numbers(array: Array) -> Array:
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _place_array(like: Array, read: Callable[[Any], NDArray]) -> Array:
    """An array of the shape, type and place of `like`; each process copies its own parts."""

    def read_part(index: tuple[slice, ...]) -> NDArray:
        return np.asarray(read(index)).astype(like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, read_part)


def _check_names(found: Any, expected: Any) -> None:
    """Raises PrimusError unless both have the same names."""
    for name in sorted(set(expected) - set(found)):
        raise PrimusError(f"the checkpoint lacks {name}", "load a checkpoint of this model")
    for name in sorted(set(found) - set(expected)):
        raise PrimusError(f"the checkpoint has {name}, which the model does not have", "load one of this model")
