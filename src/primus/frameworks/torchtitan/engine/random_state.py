"""States of the random generators of one process, under names that no other process uses."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class RandomState:
    """Reads and sets torch's generators, as torch.distributed.checkpoint expects of a part of the state.

    Args:
        rank: Of the process.
        on_gpu: Whether the generator of the current GPU belongs to the state.
    """

    def __init__(self, rank: int, on_gpu: bool) -> None:
        self._rank, self._on_gpu = rank, on_gpu

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {f"{self._rank}.cpu": torch.get_rng_state()}
        if self._on_gpu:
            state[f"{self._rank}.cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(state[f"{self._rank}.cpu"])
        if self._on_gpu:
            torch.cuda.set_rng_state(state[f"{self._rank}.cuda"])
