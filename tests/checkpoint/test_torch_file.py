"""Files of `torch.save` are read by the places of their tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from primus.checkpoint.formats.torch_file import load_state_without_data, locate_tensors, read_rows


def test_a_file_is_read_by_the_places_of_its_tensors(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    torch.save({"view": whole[1:], "parameter": torch.nn.Parameter(torch.ones(3)), "other": 1}, tmp_path / "state.pt")
    found = locate_tensors(load_state_without_data(tmp_path / "state.pt", trust_pickle=False), tmp_path / "state.pt")
    assert found.keys() == {"view", "parameter"}
    assert torch.equal(read_rows(found["view"], slice(1, 2)), whole[2:])
    assert torch.equal(read_rows(found["parameter"]), torch.ones(3))
