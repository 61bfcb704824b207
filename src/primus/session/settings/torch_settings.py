"""Settings in force of an engine on PyTorch, read from its modules, parameters and optimizers, and from its first step.

Flags say what an engine meant to do. What it did is seen in the first step: a module that runs inside of the backward
pass is recomputed, the type of its output is that of its computation, and the graph of autograd names the kernel of
attention. Compiled modules are not watched, since a hook would become a part of their graph.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from primus.checkpoint.training_state import ParamGroup
from primus.session.settings.settings_in_force import LiveSetting

KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("adapter", r"adapter|lora"),
        ("norm", r"norm"),
        ("embedding", r"embed"),
        ("router", r"router|\.gate$"),
        ("experts", r"expert"),
        ("attention", r"attn|attention"),
        ("feed_forward", r"mlp|feed_forward|ffn"),
        ("head", r"lm_head$|output(_layer)?$"),
    )
)
"""Kind of a module by its path, the first that matches; in the words of native, torchtitan, Transformers, Megatron."""
PRODUCTS = ("attention", "feed_forward")
"""Kinds whose matrix products have the precision of the run in every engine."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
KERNEL = re.compile(r"Compiled|Attention|Attn|Softmax")
"""In the name of the node of autograd that computes attention."""
MOST_NODES = 200
"""Nodes of the graph that are looked at, from the output of an attention module backwards."""


class StepWatch(AbstractContextManager["StepWatch"]):
    """Watches the eager modules of a model during one step; none if `is_compiled`."""

    def __init__(self, model: nn.Module, *, is_compiled: bool = False) -> None:
        self._modules = [] if is_compiled else list(_list_eager_modules(model))
        self._handles: list[Any] = []
        self._first: dict[str, set[str]] = {}
        self._again: dict[str, set[str]] = {}
        self.output_types: dict[str, set[str]] = {}
        """Types that the modules with weights return, by kind."""
        self.attention_kernel = ""
        self.batch_shape: tuple[int, ...] | None = None
        """Of the tokens that the embedding got."""

    def __enter__(self) -> StepWatch:
        for path, module in self._modules:
            kind, layer = find_module_kind(path), LAYER.search(path)
            has_weights = bool(_list_own_weights(module))
            if layer and (has_weights or not list(module.children())):
                self._add_pre_hook(module, self._build_pass_hook(layer[1], path))
            if has_weights:
                self._add_hook(module, self._build_type_hook(kind))
            if has_weights and kind == "embedding":
                self._add_pre_hook(module, self._note_batch)
            if "Attention" in type(module).__name__:
                self._add_hook(module, self._note_attention)
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def recomputation(self) -> str | None:
        """``none``, ``full``, ``selective``, with the number of layers unless it is all; None if nothing was seen."""
        if not self._first:
            return None
        owners = {path for path, module in self._modules if _list_own_weights(module)}
        found = [
            "full" if (ran & owners) <= self._again.get(layer, set()) else "selective"
            for layer, ran in self._first.items()
            if self._again.get(layer)
        ]
        if not found:
            return "none"
        name = "full" if set(found) == {"full"} else "selective"
        return name if len(found) == len(self._first) else f"{name} in {len(found)} of {len(self._first)} layers"

    def _add_hook(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _add_pre_hook(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(hook))

    def _build_pass_hook(self, layer: str, path: str) -> Callable[..., None]:
        # Before the module: a recomputation stops inside of the last one whose result is needed.
        def note_pass(module: nn.Module, inputs: object) -> None:
            in_backward = torch._C._current_graph_task_id() != -1
            (self._again if in_backward else self._first).setdefault(layer, set()).add(path)

        return note_pass

    def _build_type_hook(self, kind: str) -> Callable[..., None]:
        def note_type(module: nn.Module, inputs: object, output: object) -> None:
            tensor = _get_first_tensor(output)
            if tensor is not None and tensor.is_floating_point():
                self.output_types.setdefault(kind, set()).add(_format_type(tensor.dtype))

        return note_type

    def _note_batch(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        tokens = _get_first_tensor(inputs)
        self.batch_shape = None if tokens is None else tuple(tokens.shape)

    def _note_attention(self, module: nn.Module, inputs: object, output: object) -> None:
        tensor = _get_first_tensor(output)
        if not self.attention_kernel and tensor is not None and tensor.grad_fn is not None:
            self.attention_kernel = _find_kernel(tensor.grad_fn)


def find_module_kind(path: str) -> str:
    """What a module does, by its path in the model."""
    return next((kind for kind, pattern in KINDS if pattern.search(path)), "other")


def read_torch_settings(model: nn.Module, optimizers: Iterable[Any], watch: StepWatch) -> list[LiveSetting]:
    """The settings of a model and of its AdamW after the step that `watch` saw.

    Args:
        model: Of this process; a sharded parameter (`DTensor`) counts as whole.
        optimizers: Objects with `param_groups`.
        watch: Saw the first step.
    """
    optimizers = list(optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [
        LiveSetting(key=key, value=value)
        for key, value in (
            *_read_model(model),
            *_read_precision(model, watch),
            *_read_first_step(watch),
            *_read_sharding(model),
            *_read_groups(groups),
            *_read_implementation(optimizers, groups),
        )
        if value is not None
    ]


def find_compute_precision(watch: StepWatch) -> bool | str | None:
    """`bf16` as the matrix products of the first step have it; their types if it is neither; None if unseen."""
    types = set().union(*(watch.output_types.get(kind, set()) for kind in PRODUCTS))
    if types in ({"bfloat16"}, {"float32"}):
        return types == {"bfloat16"}
    return _join_names(types) or None


def is_model_compiled(model: nn.Module, call: object = None) -> bool:
    """Whether a module of the model, or `call` that calls it, is compiled and has a graph in this process."""
    if not any(_is_compiled(module) for module in (*model.modules(), call)):
        return False
    compiler = sys.modules.get("torch._dynamo.utils")  # not imported for this: it takes a second
    return compiler is not None and compiler.counters["stats"]["unique_graphs"] > 0


def is_state_sharded(model: nn.Module) -> bool:
    """Whether a parameter, and with it its gradient and moments, is divided among several processes."""
    return any(
        placement.is_shard() and size > 1
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    )


def find_applied_gradients(optimizers: Iterable[Any]) -> dict[Tensor, Tensor] | None:
    """By parameter, the gradient that AdamW got in its only step so far, from its first moments; None if it took more.

    The first moment is then (1 - beta1) times the gradient, as clipped.
    """
    found: dict[Tensor, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if "betas" not in group or float(state.get("step", 0)) != 1 or "exp_avg" not in state:
                    return None
                wide_dtype = torch.promote_types(state["exp_avg"].dtype, torch.float32)
                found[parameter] = state["exp_avg"].to(wide_dtype) / (1 - group["betas"][0])
    return found


def measure_applied_norm(optimizers: Iterable[Any]) -> float | None:
    """Norm of `find_applied_gradients`; every process must call it."""
    gradients = find_applied_gradients(optimizers)
    if not gradients:
        return None
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return float(torch.linalg.vector_norm(torch.stack(whole)))


Values = Iterator[tuple[str, Any]]


def _read_model(model: nn.Module) -> Values:
    parameters = list(model.parameters())
    layers = {found[1] for name, _ in model.named_parameters() if (found := LAYER.search(name))}
    yield "parameters", sum(each.numel() for each in parameters)
    yield "trained_parameters", sum(each.numel() for each in parameters if each.requires_grad)
    yield "parameter_dtype", _join_names(_format_type(each.dtype) for each in parameters)
    yield "layers_of_process", len(layers)
    yield "vocab_rows", _find_vocab_rows(model)
    yield (
        "attention_modules",
        _join_names(type(module).__name__ for module in model.modules() if "Attention" in type(module).__name__),
    )
    yield "parameter_device", _join_names(each.device.type for each in parameters)
    yield "deterministic", torch.are_deterministic_algorithms_enabled()


def _read_precision(model: nn.Module, watch: StepWatch) -> Values:
    """For each kind of module the type of its weights, and of its results."""
    weights: dict[str, set[str]] = {}
    for name, parameter in model.named_parameters():
        kind = find_module_kind(name.rpartition(".")[0])
        weights.setdefault(kind, set()).add(_format_type(parameter.dtype))
    for kind, types in sorted(weights.items()):
        results = watch.output_types.get(kind)
        computes = f", results {_join_names(results)}" if results else ""
        yield f"precision.{kind}", f"weights {_join_names(types)}{computes}"
    yield "bf16", find_compute_precision(watch)


def _read_first_step(watch: StepWatch) -> Values:
    seen = watch.recomputation
    yield "recompute_activations", {"full": True, "none": False}.get(seen, seen) if seen else None
    yield "attention_kernel", watch.attention_kernel or None
    if watch.batch_shape is not None and len(watch.batch_shape) == 2:
        yield "micro_batch_size", watch.batch_shape[0]
        yield "seq_length", watch.batch_shape[1]


def _read_sharding(model: nn.Module) -> Values:
    """The meshes and placements of sharded parameters: ``shard=2: Shard(dim=0)``."""
    found = set()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            names = mesh.mesh_dim_names or [str(index) for index in range(mesh.ndim)]
            sizes = zip(names, mesh.shape, parameter.placements, strict=True)
            found.add(" x ".join(f"{name}={size} {place}" for name, size, place in sizes))
    yield "sharding", "; ".join(sorted(found)) or None


def _read_groups(groups: Sequence[ParamGroup]) -> Values:
    decaying = [group for group in groups if group.get("weight_decay")]
    other = [group for group in groups if not group.get("weight_decay")]
    betas = [group["betas"] for group in groups if "betas" in group]
    yield "weight_decay", _get_only_value({group["weight_decay"] for group in decaying}) if decaying else 0.0
    yield "decayed_parameters", _count_parameters(decaying)
    yield "undecayed_parameters", _count_parameters(other)
    yield "adam_eps", _get_only_value({group["eps"] for group in groups if "eps" in group})
    yield "adam_beta1", _get_only_value({first for first, _ in betas})
    yield "adam_beta2", _get_only_value({second for _, second in betas})
    yield "learning_rate", _get_only_value({float(group["lr"]) for group in groups if group["params"]})


def _read_implementation(optimizers: list[Any], groups: Sequence[ParamGroup]) -> Values:
    """Class, decoupled decay, loop, and the type and place of the moments."""
    classes = {type(optimizer) for optimizer in optimizers}
    yield "optimizer_class", _join_names(f"{kind.__module__}.{kind.__qualname__}" for kind in classes)
    if classes <= {torch.optim.Adam, torch.optim.AdamW}:
        is_decoupled = all(group.get("decoupled_weight_decay", True) for group in groups)
        yield "optimizer", "adamw" if is_decoupled and torch.optim.Adam not in classes else "adam"
    yield (
        "optimizer_implementation",
        _join_names(_name_implementation(group) for group in groups if "fused" in group) or None,
    )
    moments = [state["exp_avg"] for optimizer in optimizers for state in optimizer.state.values() if "exp_avg" in state]
    yield "moment_dtype", _join_names(_format_type(each.dtype) for each in moments) or None
    yield "moment_device", _join_names(each.device.type for each in moments) or None


def _name_implementation(group: ParamGroup) -> str:
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        # The choice that the optimizer's step makes.
        fused, foreach = _default_to_fused_or_foreach(group["params"], differentiable=False, use_fused=False)
    return "fused" if fused else "foreach" if foreach else "for-loop"


def _find_kernel(node: Any) -> str:
    """Name of the nearest node of autograd that computes attention; empty if there is none near."""
    seen, waiting = {node}, deque([node])
    while waiting and len(seen) < MOST_NODES:
        each = waiting.popleft()
        if KERNEL.search(each.name()):
            return str(each.name()).removesuffix("0").removesuffix("Backward").lstrip("_")
        following = [after for after, _ in each.next_functions if after is not None and after not in seen]
        seen.update(following)
        waiting.extend(following)
    return ""


def _list_eager_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules outside of those that are compiled, by their paths without wrappers."""
    if _is_compiled(model):
        return
    yield path, model
    for name, child in model.named_children():
        is_wrapper = isinstance(model, CheckpointWrapper)
        yield from _list_eager_modules(child, path if is_wrapper else f"{path}.{name}".lstrip("."))


def _is_compiled(module: object) -> bool:
    """Whether torch.compile wraps the module, or `module.compile` has replaced its call."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _list_own_weights(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module._parameters.values() if weight is not None]


def _get_first_tensor(value: object) -> Tensor | None:
    first = value[0] if isinstance(value, tuple | list) and value else value
    return first if isinstance(first, Tensor) else None


def _count_parameters(groups: Sequence[ParamGroup]) -> int:
    """Elements of the parameters; those of this process where Megatron's distributed optimizer has cut them."""
    return sum(parameter.numel() for group in groups for parameter in group["params"])


def _get_only_value(values: set[Any]) -> Any:
    """The only value; a list if there are several, None without one."""
    return next(iter(values)) if len(values) == 1 else sorted(values) or None


def _find_vocab_rows(model: nn.Module) -> int | None:
    """Rows of the input embedding, padding included; None if the process does not hold it."""
    for name, parameter in model.named_parameters():
        if "embed" in name and parameter.ndim == 2:
            return int(parameter.shape[0])
    return None


def _format_type(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
