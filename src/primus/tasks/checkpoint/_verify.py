"""Prove that a converted checkpoint has the weights of its source."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.errors import PrimusError, UsageError
from primus.framework import FRAMEWORKS
from primus.model_source.options import SourceOptions, show_progress
from primus.registry import load_plug_in

if TYPE_CHECKING:
    from torch import Tensor

    from primus.checkpoint.convert import PlannedConversion
    from primus.checkpoint.weights import WeightReader
    from primus.config.schema import ModelSpec

LOGITS_BYTES = 8 << 30
"""Largest model in float32 whose logits are computed: two of them are in memory one after the other."""
NUM_TOKENS = 64
TOLERANCE = 1e-4
"""Relative difference of logits between two implementations in float32 (docs/checkpoint-convert.md)."""


def verify_conversion(planned: PlannedConversion, spec: ModelSpec, target: Path, options: SourceOptions) -> list[str]:
    """What was compared, in words.

    Args:
        planned: What was to be written.
        spec: The model.
        target: The written checkpoint.
        options: How it is read.

    Raises:
        PrimusError: A tensor or the logits differ.
    """
    from primus.checkpoint.convert import find_nonfinite
    from primus.checkpoint.formats.open import open_checkpoint
    from primus.checkpoint.formats.optimizer_state import open_training_state

    weights = planned.weights
    tensors = weights.list_tensors()
    written = open_checkpoint(str(target), spec, options.trust_pickle)
    _compare_all({"": (weights, written.weights)}, target)
    found = [f"all {len(tensors):,} tensors equal those of the source"]
    if planned.training is not None:
        state = open_training_state(written)
        assert state is not None, "it was written"
        _compare_all({f" {name}": (own, state.moments[name]) for name, own in planned.training.moments.items()}, target)
        if state.num_updates != planned.training.num_updates or state.position.step != planned.training.position.step:
            raise PrimusError(f"{target}: its optimizer is at another step than that of the source")
        found.append("the state of the optimizer equals that of the source")
    nonfinite = find_nonfinite(written.weights)
    if nonfinite:
        first = f"{nonfinite[0].name} with {nonfinite[0].different:,} of them"
        found.append(f"{len(nonfinite)} tensors have NaN or infinite values, among them {first}")
    num_parameters = sum(info.num_bytes // info.dtype.itemsize for info in tensors.values())
    if 4 * num_parameters > LOGITS_BYTES:
        return [*found, f"logits not compared: {4 * num_parameters / 1e9:.0f} GB in float32"]
    return found + _compare_logits(written.weights, weights, spec, target)


def _compare_all(pairs: Mapping[str, tuple[WeightReader, WeightReader]], target: Path) -> None:
    """Compare the tensors of several sources.

    Raises:
        PrimusError: One differs.
    """
    from primus.checkpoint.convert import compare_weights

    total = sum(info.num_bytes for source, _ in pairs.values() for info in source.list_tensors().values())
    with show_progress("verifying", total) as report:
        for kind, (own, written) in pairs.items():
            differences = compare_weights(own, written, report)
            if differences:
                raise PrimusError(
                    f"{target}: {len(differences)} tensors differ from the source, among them"
                    f" {differences[0].name}{kind}",
                    "convert it again; if that does not help, report it",
                )


def _compare_logits(written: WeightReader, weights: WeightReader, spec: ModelSpec, target: Path) -> list[str]:
    import torch

    native: Any = load_plug_in(FRAMEWORKS, "native")
    tokens_BS = torch.randint(spec.vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    try:
        ours: Tensor = native.compute_logits(spec, weights, tokens_BS)
    except UsageError as error:
        return [f"logits not compared: {error.problem}"]
    if not bool(torch.isfinite(ours).all()):
        return ["logits not compared: those of the source are not finite"]
    theirs = native.compute_logits(spec, written, tokens_BS)
    if not torch.equal(ours, theirs):
        raise PrimusError(f"{target}: its logits differ from those of the source")
    found = ["logits equal those of the source (native)"]
    if not (target / "config.json").is_file() or find_spec("transformers") is None:
        return found
    difference = _compute_transformers_difference(target, tokens_BS, ours)
    if difference > TOLERANCE:
        raise PrimusError(f"{target}: logits of transformers differ from native's by {difference:.1e}, relatively")
    return [*found, f"logits of transformers differ from native's by {difference:.1e}, relatively"]


def _compute_transformers_difference(folder: Path, tokens_BS: Tensor, ours: Tensor) -> float:
    """Largest difference of logits over the largest logit."""
    import torch

    transformers = import_module("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        theirs = model(tokens_BS).logits
    return float((theirs - ours).abs().max() / ours.abs().max())
