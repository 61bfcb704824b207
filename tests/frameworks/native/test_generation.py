"""Generation: the likeliest tokens, draws with a seed, ends, and log-probabilities as training computes them."""

from __future__ import annotations

import pytest
import torch

from checkpoint_models import NATIVE, make_spec
from primus.data.training.masks import DocumentHandling
from primus.errors import UsageError
from primus.frameworks.native.engine.loss import cross_entropy
from primus.frameworks.native.engine.model import Transformer, build_model
from primus.frameworks.native.engine.post_training.generate import Sampling, choose_tokens, generate

PROMPTS = [[3, 4], [5, 6, 7, 8, 9, 10, 11], [1], [12, 13, 14, 15]]
WINDOWS = {"window_size": 5, "window_layer_period": 2}
SPECS = {name: make_spec(**changes) for name, changes in NATIVE.items()}
SPECS |= {"windows": make_spec(**WINDOWS), "windows and sinks": make_spec(**NATIVE["gpt_oss"], **WINDOWS)}


def build(name: str = "llama", **changes: int) -> Transformer:
    """A model whose next token is far from certain, and not that of every text."""
    spec = SPECS[name] if not changes else make_spec(**NATIVE[name], **changes)
    model = build_model(spec, "cpu", seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.3
            weight.add_(noise) if weight.ndim == 1 else weight.copy_(noise)
    return model


@pytest.mark.parametrize("name", SPECS)
def test_tokens_of_a_batch_are_the_likeliest_of_whole_passes(name: str) -> None:
    model = build(name)
    for prompt, found in zip(PROMPTS, generate(model, PROMPTS, 12).completions, strict=True):
        tokens = torch.tensor([[*prompt, *found.tokens]])
        with torch.no_grad():
            logits = (model(tokens[:, :-1]) @ model.output_weight.T)[0, len(prompt) - 1 :]
        assert found.tokens == logits.argmax(1).tolist()
        assert found.stop_reason == "length"


@pytest.mark.parametrize("name", SPECS)
def test_log_probabilities_of_draws_are_those_of_training(name: str) -> None:
    model = build(name)
    found = generate(model, PROMPTS, 12, Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=1))
    for prompt, completion in zip(PROMPTS, found.completions, strict=True):
        tokens = torch.tensor([[*prompt, *completion.tokens]])
        hidden = model(tokens[:, :-1])[:, len(prompt) - 1 :]
        each = zip(hidden[0], completion.tokens, strict=True)
        trained = [-cross_entropy(row[None], model.output_weight, torch.tensor([token])).item() for row, token in each]
        assert completion.log_probabilities == pytest.approx(trained, abs=1e-5)


def test_a_draw_depends_on_its_seed_and_place_and_not_on_other_prompts() -> None:
    model, sampling = build(), Sampling(temperature=1.0, seed=5)
    alone = generate(model, PROMPTS[:1], 12, sampling).completions[0].tokens
    together = [each.tokens for each in generate(model, [PROMPTS[0]] * 3, 12, sampling).completions]
    assert together[0] == alone
    assert len(set(map(tuple, together))) == 3
    assert generate(model, PROMPTS[:1], 12, Sampling(temperature=1.0, seed=6)).completions[0].tokens != alone


def test_draws_have_the_probabilities_of_the_tokens_that_are_kept() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    noise = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    logits = probabilities.log().expand(1000, -1)
    for sampling, expected in (
        (Sampling(1.0), [400, 300, 200, 100]),
        (Sampling(1.0, top_k=2), [571, 429, 0, 0]),
        (Sampling(1.0, top_p=0.75), [444, 333, 222, 0]),
        (Sampling(0.5), [533, 300, 133, 33]),
    ):
        counts = torch.bincount(choose_tokens(logits, sampling, noise), minlength=4)
        assert counts.tolist() == pytest.approx(expected, abs=1), sampling


def test_a_completion_ends_at_a_token_a_text_or_where_the_context_is_full() -> None:
    model = build()
    whole = [each.tokens for each in generate(model, PROMPTS, 12).completions]
    end = whole[1][4]
    found = generate(model, PROMPTS, 12, ends=[end]).completions
    for row, completion in zip(whole, found, strict=True):
        assert completion.tokens == (row[: row.index(end) + 1] if end in row else row)
        assert completion.stop_reason == ("stop" if end in row else "length")
    # Rows that are over stay in the batch until a quarter of it is: those that go on do not notice.
    lengths = [len(each.tokens) for each in generate(model, PROMPTS, 12, ends=[whole[1][4], whole[2][6]]).completions]
    assert len(set(lengths)) > 1
    by_text = generate(model, PROMPTS, 12, is_end=lambda tokens: len(tokens) == 3).completions
    assert [each.tokens for each in by_text] == [row[:3] for row in whole]
    full = generate(build(max_position_embeddings=8), PROMPTS, 12).completions
    assert [len(each.tokens) for each in full] == [8 - len(prompt) for prompt in PROMPTS]
    assert {each.stop_reason for each in full} == {"context"}


@pytest.mark.parametrize(("prompt", "problem"), [([], "prompt 2 is empty"), ([1] * 8, "prompt 2 has 8 tokens")])
def test_a_prompt_that_cannot_be_continued_is_refused(prompt: list[int], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        generate(build(max_position_embeddings=8), [[1], prompt], 4)


def test_the_memory_of_the_cache_is_that_of_the_longest_text() -> None:
    spec = SPECS["llama"]
    heads, channels, tokens = 2, 8, 7 + 12 + 2
    found = generate(build(), PROMPTS, 12)
    assert found.cache_bytes == len(PROMPTS) * spec.num_layers * 2 * heads * channels * tokens * 4


def test_generation_leaves_a_model_as_it_is() -> None:
    model, tokens = build(), torch.tensor([PROMPTS[1]])
    model.documents = DocumentHandling(9, True, True)
    before = model(tokens)
    generate(model, PROMPTS, 2)
    assert torch.equal(model(tokens), before)
