"""Settings as an engine really has them, read back from its model and its optimizer after the first step.

What an experiment asks for is in the configuration of the run. A comparison of engines needs what they made of it:
an engine that decays norms, pads the vocabulary or computes in another type does not say so in its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from primus.callback import Callback, StepReport

if TYPE_CHECKING:
    from torch import nn

EVENT = "engine_settings"


class EngineSettingsRecorder(Callback):
    """A callback that records the settings after the first step of an attempt: Megatron sets some in the step.

    Args:
        append_event: Appends to the events of the run, on rank 0.
        describe: Reads the settings.
    """

    def __init__(self, append_event: Callable[..., None], describe: Callable[[], Mapping[str, Any]]) -> None:
        self._append_event, self._describe = append_event, describe
        self._is_done = False

    def after_report(self, report: StepReport) -> None:
        if not self._is_done:
            self._is_done = True
            self._append_event(EVENT, step=report.step, settings=dict(self._describe()))


def describe_torch_settings(model: nn.Module, optimizers: Iterable[Any]) -> dict[str, Any]:
    """The settings of a model and of its AdamW, by the names of the schema where it has one.

    Args:
        model: Its parameters may be sharded: `DTensor` counts as whole.
        optimizers: Objects with `param_groups`.
    """
    parameters = {id(each): each for each in model.parameters()}.values()
    found = {
        "parameters": sum(each.numel() for each in parameters),
        "parameter_dtype": _join_names(str(each.dtype) for each in parameters),
        "vocab_rows": _find_vocab_rows(model),
        "attention_modules": _join_names(
            type(module).__name__ for module in model.modules() if "Attention" in type(module).__name__
        ),
        "compiled_modules": sum(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()),
    }
    return found | _describe_groups([group for optimizer in optimizers for group in optimizer.param_groups])


def _describe_groups(groups: list[dict[str, Any]]) -> dict[str, Any]:
    decaying = [group for group in groups if group.get("weight_decay")]
    other = [group for group in groups if not group.get("weight_decay")]
    betas = {tuple(group["betas"]) for group in groups if "betas" in group}
    found: dict[str, Any] = {
        "weight_decay": _get_only_value({group["weight_decay"] for group in decaying}) if decaying else 0.0,
        "decayed_parameters": _count_parameters(decaying),
        "undecayed_parameters": _count_parameters(other),
        "adam_eps": _get_only_value({group["eps"] for group in groups if "eps" in group}),
    }
    if len(betas) == 1:
        found["adam_beta1"], found["adam_beta2"] = betas.pop()
    return found


def _count_parameters(groups: list[dict[str, Any]]) -> int:
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


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))).replace("torch.", "")
