from __future__ import annotations

import numpy as np
import pytest

from primus.data.filter.dedup.minhash import LARGEST, compute_band_keys, compute_signatures, estimate_similarity
from primus.data.filter.dedup.normalized_words import hash_words
from primus.data.filter.dedup.recipe import VERSION, DedupRecipe
from primus.errors import UsageError

RANDOM = np.random.default_rng(5)


def words(count: int) -> np.ndarray:
    return RANDOM.integers(0, 1 << 63, count, dtype=np.uint64)


def signature(some: np.ndarray, recipe: DedupRecipe) -> np.ndarray:
    return np.asarray(compute_signatures(some, np.array([0, len(some)]), recipe)[0])


@pytest.mark.parametrize("jaccard", [0.5, 0.72, 0.9])
def test_equal_minima_estimate_the_similarity_and_bands_are_found_as_the_recipe_says(jaccard: float) -> None:
    recipe = DedupRecipe(ngram=1)
    size, pairs = 400, 300
    common = round(2 * size * jaccard / (1 + jaccard))
    estimates, hits = [], 0
    for _ in range(pairs):
        one = words(size)
        both = np.concatenate([one, one[:common], words(size - common)])
        minima = compute_signatures(both, np.array([0, size, 2 * size]), recipe)
        estimates.append(estimate_similarity(minima[0], minima[1]))
        keys = compute_band_keys(minima, recipe)
        hits += bool((keys[:, 0] == keys[:, 1]).any())
    deviation = (jaccard * (1 - jaccard) / recipe.num_hashes) ** 0.5
    assert np.mean(estimates) == pytest.approx(jaccard, abs=4 * deviation / pairs**0.5 + 0.002)
    assert np.std(estimates) == pytest.approx(deviation, rel=0.25)
    chance = recipe.estimate_probability(jaccard)
    assert hits / pairs == pytest.approx(chance, abs=4 * (chance * (1 - chance) / pairs) ** 0.5 + 0.01)


def test_a_signature_is_of_the_set_of_shingles() -> None:
    recipe = DedupRecipe(ngram=3)
    some = words(20)
    assert (signature(some, recipe) == signature(np.concatenate([some, some]), recipe)).mean() > 0.8
    assert (signature(some, recipe) == signature(some[::-1].copy(), recipe)).mean() < 0.1
    by_shingle = np.min([signature(some[at : at + 3], recipe) for at in range(18)], axis=0)
    assert signature(some, recipe).tolist() == by_shingle.tolist()


def test_a_document_shorter_than_a_shingle_is_one_and_one_without_words_has_none() -> None:
    recipe = DedupRecipe()
    some = words(3)
    assert estimate_similarity(signature(some, recipe), signature(some[:2].copy(), recipe)) == 0
    assert estimate_similarity(signature(some, recipe), signature(some.copy(), recipe)) == 1
    assert set(signature(some[:0], recipe).tolist()) == {int(LARGEST)}


def test_each_band_has_a_key_of_its_own_minima() -> None:
    recipe = DedupRecipe(bands=3, rows=2)
    minima = np.array([[1, 2, 1, 2, 5, 6], [1, 2, 9, 2, 6, 5]], np.uint32)
    keys = compute_band_keys(minima, recipe)
    assert (keys[:, 0] == keys[:, 1]).tolist() == [True, False, False]
    assert keys[0, 0] != keys[1, 0]


def test_another_seed_gives_another_signature() -> None:
    some = words(50)
    assert estimate_similarity(signature(some, DedupRecipe(seed=1)), signature(some, DedupRecipe(seed=2))) < 0.1


def test_signatures_are_what_they_were() -> None:
    """Else the version of the recipe has to change: work that was begun goes on with keys of both."""
    hashes = hash_words(["One paragraph, of 10 words\u2014some of them na\u00efve".encode()])
    keys = compute_band_keys(compute_signatures(*hashes, DedupRecipe()), DedupRecipe())
    assert (VERSION, hex(int(np.bitwise_xor.reduce(keys[:, 0])))) == (1, "0x4efcbfe63cf93794")


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"bands": 0}, "bands 0"), ({"method": "fuzzy"}, "'fuzzy'"), ({"rows": 5000}, "5000"), ({"seed": -1}, "seed -1")],
)
def test_a_recipe_that_cannot_be_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DedupRecipe(**settings).check()  # type: ignore[arg-type]
