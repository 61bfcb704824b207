"""megatron-core trains experts, and resumes with the distributed optimizer, without Transformer Engine and Apex.

Its router asks for `te_general_gemm` without checking that the import of Transformer Engine succeeded. Its distributed
optimizer copies every entry of the optimizer's state from the checkpoint; torch's AdamW has the entry `step`, which is
stored for a whole group.
"""

from __future__ import annotations

from datetime import date
from importlib.util import find_spec
from typing import Any

from primus.patch import Patch

PATCH = Patch(
    target="megatron-core",
    module="megatron.core",
    versions=">=0.16,<0.20",
    reason="without Transformer Engine the router fails on a missing name, and the distributed optimizer cannot resume",
    link="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/distrib_optimizer.py#L936",
    expires=date(2027, 6, 30),
    backend=("megatron", "megatron_bridge"),
)


def is_needed() -> bool:
    """Whether Transformer Engine and Apex are missing, so that PyTorch's optimizer is used."""
    return find_spec("transformer_engine") is None and find_spec("apex") is None


def apply() -> None:
    """Define the missing name, and keep the step count of AdamW while the state of a weight is restored."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    restore = DistributedOptimizer._set_main_param_and_optimizer_states

    def restore_moments(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        steps = {"step": state["step"]} if "step" in state else {}
        restore(self, model_param, steps | tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = restore_moments
