"""Frameworks that users name and that primus does not drive: the reason, and what to use instead."""

from __future__ import annotations

from typing import NamedTuple


class FrameworkRefusal(NamedTuple):
    """Why a framework is not supported, and what to use instead."""

    reason: str
    remedy: str


# https://pypi.org/project/nemo-toolkit: the extras of 3.0 are asr, tts and audio. LLM training moved to
# https://github.com/NVIDIA-NeMo/Megatron-Bridge and https://github.com/NVIDIA-NeMo/Automodel.
_NEMO = FrameworkRefusal(
    "NeMo 3 trains speech models only; its LLM training moved to Megatron-Bridge and NeMo AutoModel",
    "framework: megatron (Megatron-Core) or torchtitan (FSDP2)",
)
_AUTOMODEL = FrameworkRefusal("NeMo AutoModel has no driver here", "framework: torchtitan trains with FSDP2 as well")

REFUSED_FRAMEWORKS = {
    "nemo": _NEMO,
    "nemo_toolkit": _NEMO,
    "nemo_automodel": _AUTOMODEL,
    "automodel": _AUTOMODEL,
    "maxdiffusion": FrameworkRefusal("MaxDiffusion trains image models", "framework: jax trains language models"),
}
"""Refusals by name in lower case with underscores. A framework of that name, such as a plug-in, takes precedence."""


SPELLINGS = {"torchtatin": "torchtitan", "bridge": "megatron_bridge"}
"""Frameworks by another spelling: a misspelling of the guides of AMD-AGI/Primus, and a short name."""


def find_refusal(framework: str) -> FrameworkRefusal | None:
    """The refusal of a framework that primus does not drive; None if the name is unknown."""
    return REFUSED_FRAMEWORKS.get(framework.strip().lower().replace("-", "_").replace(" ", "_"))
