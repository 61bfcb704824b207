"""Settings of training on preferences, and the losses by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct


class PreferenceFormula(NamedTuple):
    """A loss of a pair of answers to one prompt."""

    formula: str
    """c and r: log-probability of the chosen and of the rejected answer; with 0, of the reference; |c|: tokens."""
    paper: str
    needs_reference: bool
    beta: float
    """Where none is set."""


FORMULAS = {
    "dpo": PreferenceFormula("-log sigmoid(beta ((c - c0) - (r - r0)))", "arXiv 2305.18290, equation 7", True, 0.1),
    "ipo": PreferenceFormula(
        "((c - c0)/|c| - (r - r0)/|r| - 1/(2 beta))^2",
        "arXiv 2310.12036, equation 17, with the means that its authors confirmed to trl",
        True,
        0.1,
    ),
    "orpo": PreferenceFormula(
        "-c/|c| - beta log sigmoid(log odds(c/|c|) - log odds(r/|r|)), odds(x) = e^x / (1 - e^x)",
        "arXiv 2403.07691, equations 6 and 7",
        False,
        0.1,
    ),
    "simpo": PreferenceFormula(
        "-log sigmoid(beta (c/|c| - r/|r|) - gamma)", "arXiv 2405.14734, equation 6", False, 2.0
    ),
}


class PreferenceSettings(Struct, frozen=True, kw_only=True):
    """What is learnt from sft_data_path."""

    loss: Literal["sft", "dpo", "ipo", "orpo", "simpo", "grpo", "dapo", "dr_grpo", "gspo"] = "sft"
    """sft learns answers; dpo to simpo learn to prefer one answer to another, from rows with chosen and rejected; grpo
    to gspo (`train rl`) learn from rewards of completions of prompts."""
    beta: Annotated[float, Meta(gt=0)] | None = None
    """Strength of a preference; 0.1 when null, of simpo 2."""
    gamma: Annotated[float, Meta(ge=0)] = 1.0
    """Margin of simpo."""


def learns_preferences(backend_args: Mapping[str, Any]) -> bool:
    """Whether the rows of sft_data_path are pairs of answers."""
    return backend_args.get("loss", "sft") in FORMULAS
