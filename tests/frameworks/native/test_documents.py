"""Documents packed into one sequence: each as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.config.schema import ModelSpec
from primus.data.training.masks import DocumentHandling
from primus.frameworks.native.engine.documents import build_attention_mask, compute_positions, number_documents
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.recompute import ActivationMemory

EOD = 0
SPEC = ModelSpec(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=160,
    init_method_std=0.2,
)
LENGTHS = [5, 1, 9, 3, 14]


def packed() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A sequence of documents, the last of them unfinished, and each of them."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, 160, (length,), generator=generator) for length in LENGTHS]
    for document in documents[:-1]:
        document[-1] = EOD
    return torch.cat(documents)[None], [document[None] for document in documents]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    reset_positions=st.booleans(),
    reset_attention=st.booleans(),
)
@settings(deadline=None)
def test_positions_and_mask_are_those_of_megatron(
    tokens: list[int], reset_positions: bool, reset_attention: bool
) -> None:
    expected = np.arange(len(tokens))
    hidden = ~np.tri(len(tokens), dtype=bool)
    start = 0
    for index, token in enumerate(tokens):
        if token == EOD:
            hidden[index + 1 :, : index + 1] = True
            expected[index + 1 :] -= index + 1 - start
            start = index + 1
    assert compute_positions(number_documents(torch.tensor([tokens]), EOD))[0].tolist() == expected.tolist()
    assert (~build_attention_mask(number_documents(torch.tensor([tokens]), EOD))[0, 0]).tolist() == hidden.tolist()


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_documents_have_the_outputs_and_gradients_of_each_alone(recompute: bool) -> None:
    tokens, documents = packed()
    together, alone = (build_model(SPEC, "cpu", seed=1) for _ in range(2))
    together.documents = DocumentHandling(EOD, True, True)
    together.activations = ActivationMemory("full" if recompute else None)
    hidden = together(tokens)
    separate = torch.cat([alone(document) for document in documents], 1)
    torch.testing.assert_close(hidden, separate, rtol=1e-5, atol=1e-5)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    (hidden * weights).sum().backward()
    (separate * weights).sum().backward()
    for one, other in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)


def test_without_a_reset_earlier_documents_are_seen() -> None:
    tokens, documents = packed()
    model = build_model(SPEC, "cpu", seed=1)
    last = model(documents[-1])
    for reset_positions, reset_attention in ((False, False), (True, False)):
        model.documents = DocumentHandling(EOD, reset_positions, reset_attention)
        assert not torch.allclose(model(tokens)[:, -LENGTHS[-1] :], last, atol=1e-2)


def test_positions_alone_change_nothing_where_attention_stays_within_documents() -> None:
    """Rotary embedding sees differences of positions only, and within a document they are the same."""
    tokens, _ = packed()
    model = build_model(SPEC, "cpu", seed=1)
    outputs = []
    for reset_positions in (False, True):
        model.documents = DocumentHandling(EOD, reset_positions, True)
        outputs.append(model(tokens))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_no_reset_is_bit_by_bit_what_it_was_without_documents() -> None:
    tokens, _ = packed()
    model = build_model(SPEC, "cpu", seed=1)
    before = model(tokens)
    model.documents = DocumentHandling(EOD, False, False)
    assert torch.equal(model(tokens), before)
