"""Steps of engines are compared with those of a reference, and drawn."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from primus.comparison.engines.engine_runs import split_errors
from primus.comparison.engines.parity import FLOAT32, EngineSteps, compare_steps
from primus.comparison.engines.picture import draw_parity
from primus.report import page
from primus.report.charts import select_wide


def make_steps(engine: str, *losses: float | None, **changes: object) -> EngineSteps:
    tokens = list(range(len(losses)))
    values = {"losses": list(losses), "grad_norms": [1.0] * len(losses), "tokens": tokens, **changes}
    return EngineSteps(engine=engine, **values)


def test_the_first_step_has_a_tighter_bound() -> None:
    reference = make_steps("a", 2.0, 2.0, 2.0)
    assert compare_steps(reference, make_steps("b", 2.00001, 2.0, 2.0), FLOAT32).first_step_above == 1
    assert compare_steps(reference, make_steps("b", 2.0, 2.00001, 2.0001), FLOAT32).first_step_above == 3


def test_two_units_in_the_last_place_of_a_large_loss_are_equal_at_step_1() -> None:
    assert compare_steps(make_steps("a", 9.0), make_steps("b", 9.0 + 2**-19), FLOAT32).agrees
    assert not compare_steps(make_steps("a", 9.0), make_steps("b", 9.0 + 2**-18), FLOAT32).agrees


def test_a_step_that_is_finite_on_one_engine_only_is_above_the_tolerance() -> None:
    found = compare_steps(make_steps("a", 2.0, 2.0), make_steps("b", 2.0, None), FLOAT32)
    assert found.first_step_above == 2 and found.max_loss_difference == math.inf
    assert compare_steps(make_steps("a", 2.0, None), make_steps("b", 2.0, None), FLOAT32).agrees


def test_other_tokens_are_found_and_tokens_of_an_own_loader_are_not_known() -> None:
    reference = make_steps("a", 2.0, 2.0)
    other = compare_steps(reference, make_steps("b", 2.0, 2.0, tokens=[0, 7]), FLOAT32)
    assert other.same_tokens is False and other.first_step_of_other_tokens == 2 and not other.agrees
    assert compare_steps(reference, make_steps("b", 2.0, 2.0, tokens=None), FLOAT32).same_tokens is None


def test_other_learning_rates_are_found_and_rounding_to_float32_is_not() -> None:
    reference = make_steps("a", 2.0, 2.0, learning_rates=[1e-4, 2e-4])
    near = make_steps("b", 2.0, 2.0, learning_rates=[1e-4 * (1 + 1e-7), 2e-4])
    assert compare_steps(reference, near, FLOAT32).first_step_of_other_learning_rate is None
    late = make_steps("b", 2.0, 2.0, learning_rates=[1e-4, 1e-4])
    assert compare_steps(reference, late, FLOAT32).first_step_of_other_learning_rate == 2


def test_a_message_of_the_launcher_is_split_into_problem_and_hint() -> None:
    text = "a warning\nprimus-cli: no module 'post_trainer'\n  run another task\n"
    assert split_errors(text) == ("no module 'post_trainer'", "run another task")
    assert split_errors("Traceback\nValueError: x\n") == ("ValueError: x", "")


def test_a_gradient_norm_is_compared_relative_to_its_size() -> None:
    reference = make_steps("a", 2.0, grad_norms=[100.0])
    assert compare_steps(reference, make_steps("b", 2.0, grad_norms=[100.005]), FLOAT32).agrees
    assert compare_steps(reference, make_steps("b", 2.0, grad_norms=[100.05]), FLOAT32).first_step_above == 1


def test_the_picture_shows_a_gap_where_a_loss_is_not_finite_and_a_dot_for_a_single_step() -> None:
    picture = select_wide(draw_parity(make_steps("a", 2.0, 1.9, None, 1.8), [make_steps("b", 2.0)], FLOAT32))
    lines = [each for each in ElementTree.fromstring(picture).iter() if "line c" in each.get("class", "")]
    named = [line for line in lines if line[0].text]  # those of the legend have no tip
    assert [(line[0].text, "dot" in line.get("class", "")) for line in named[:3]] == [
        ("a", False),
        ("a", True),
        ("b", True),
    ]
    assert named[0].get("d", "").count("L") == 1


def test_the_picture_shows_every_engine_and_the_tolerance() -> None:
    steps = [make_steps(name, 2.0, 1.9, None, 1.8) for name in ("native", "jax", "<torch>")]
    picture = draw_parity(steps[0], steps[1:], FLOAT32)
    assert isinstance(picture, page.Html)
    wide = ElementTree.fromstring(select_wide(picture))
    texts = [element.text for element in wide.iter() if element.tag.endswith("text")]
    assert {"native", "jax", "<torch>", "tolerance 5e-05"} <= set(texts)
    assert "relative difference of the gradient norm" in picture and "tolerance 0.0001" in picture
