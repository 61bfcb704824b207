"""The proof of fairness: each class of unfairness is caught by its own rule, and what is not stated is not shown."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs
from tests.comparison.fair_results import START, change_settings, make_rate, make_result

from primus.comparison.fairness.evidence import collect_evidence
from primus.comparison.fairness.loss_curves import compare_loss_curves, estimate_loss_spread
from primus.comparison.fairness.rules import read_fairness_rules, translate_settings
from primus.comparison.fairness.verdict import PairVerdict, judge_pair
from primus.comparison.results.result import ComparisonResult, LoadSample, ResultInputs, ResultLoad, ResultSteps
from primus.config.schema import OWNERS

IN_STEPS = START + 4.0
"""A time while the steps of a result run."""
Change = Callable[[ComparisonResult], ComparisonResult]
RESOLVED = {"bf16", "fp8", "recompute_activations", "min_lr_ratio", "lr_warmup_fraction"}
"""Keys of the schema that are translated before they are compared."""


def judge(a: ComparisonResult, b: ComparisonResult, chosen: Any = "identical") -> PairVerdict:
    return judge_pair(collect_evidence(a, "a"), collect_evidence(b, "b"), chosen)


def list_unfair(verdict: PairVerdict) -> list[str]:
    return [check.rule for check in verdict.checks if check.judgement == "unfair"]


def change_steps(result: ComparisonResult, **columns: Any) -> ComparisonResult:
    return structs.replace(result, steps=structs.replace(result.steps, **columns))


def change_inputs(result: ComparisonResult, **inputs: Any) -> ComparisonResult:
    return structs.replace(result, inputs=structs.replace(result.inputs, **inputs))


def swap_batches(result: ComparisonResult) -> ComparisonResult:
    tokens = list(result.inputs.tokens or [])
    return change_inputs(result, tokens=[*tokens[:9], tokens[10], tokens[9], *tokens[11:]])


def delay_schedule(result: ComparisonResult) -> ComparisonResult:
    rates = result.steps.learning_rate
    return change_steps(result, learning_rate=[0.0, *rates[:-1]])


def drop_first_steps(result: ComparisonResult) -> ComparisonResult:
    columns = {name: getattr(result.steps, name)[10:] for name in ResultSteps.__struct_fields__}
    return change_inputs(change_steps(result, **columns), tokens=(result.inputs.tokens or [])[10:])


def change_engine(result: ComparisonResult, *chosen: str, **settings: Any) -> ComparisonResult:
    """What the engine really had, and what of it was asked for in its own words."""
    return structs.replace(result, engine_settings={**result.engine_settings, **settings}, chosen_settings=list(chosen))


PLANTED: dict[str, tuple[Change, str]] = {
    "batch": (lambda each: change_settings(each, global_batch_size=16), "setting global_batch_size"),
    "data order": (swap_batches, "tokens"),
    "dtype": (lambda each: structs.replace(each, precision="bfloat16"), "precision used"),
    "warm-up": (drop_first_steps, "measured steps"),
    "FLOP convention": (
        lambda each: structs.replace(each, flops=structs.replace(each.flops, flops_per_token=1.4e6, convention="full")),
        "FLOP convention",
    ),
    "recompute": (lambda each: change_settings(each, recompute_activations=True), "setting recompute"),
    "schedule shift": (delay_schedule, "learning rates"),
    "weight decay of norms": (
        lambda each: change_settings(each, decayed_parameters=905, undecayed_parameters=0),
        "setting weight_decay_norms",
    ),
    "padding in the softmax": (lambda each: change_settings(each, padded_vocab_size=512), "setting padded_vocab_size"),
    "initial weights": (lambda each: change_inputs(each, weights="e" * 64), "initial weights"),
    "sequence length": (lambda each: change_settings(each, seq_length=64), "setting seq_length"),
    "other load": (lambda each: structs.replace(each, load=ResultLoad(other_cpu_share=0.4)), "other load"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_class_of_unfairness_is_caught_by_its_own_rule(name: str) -> None:
    fair, (change, rule) = make_result("native"), PLANTED[name]
    assert judge(fair, make_result("torchtitan")).status == "fair"
    verdict = judge(fair, change(make_result("torchtitan")))
    assert verdict.status == "unfair"
    assert set(list_unfair(verdict)) - {"setting undecayed_parameters"} == {rule}
    assert any(reason.startswith(rule) for reason in verdict.list_reasons())


def test_other_load_is_unfair_above_a_twentieth_of_the_machine() -> None:
    def judge_load(share: float) -> PairVerdict:
        return judge(make_result(load=ResultLoad(other_cpu_share=share)), make_result("jax"))

    assert list_unfair(judge_load(0.051)) == ["other load"]
    assert judge_load(0.05).status == "fair"
    assert "51%" not in judge_load(0.049).list_reasons()


@pytest.mark.parametrize("key", ["parallelism.enable_y", "micro_batch_size"])
def test_a_difference_that_only_the_class_tuned_allows_is_said_in_the_class_identical(key: str) -> None:
    sides = [change_engine(make_result(name), key, **{key: number}) for number, name in enumerate(("a", "b"), 2)]
    verdict = judge(*sides)
    assert verdict.status != "fair" and any(f"setting {key}" in reason for reason in verdict.list_reasons())


def test_other_load_is_the_same_for_runs_that_took_turns_with_each_other() -> None:
    def load(framework: str, group: str) -> ComparisonResult:
        result = make_result(framework)
        cell = structs.replace(result.cell, turn_group=group)
        return structs.replace(result, cell=cell, load=ResultLoad(other_cpu_share=0.4))

    assert judge(load("native", "one"), load("torchtitan", "one")).status == "fair"
    assert list_unfair(judge(load("native", "one"), load("torchtitan", "two"))) == ["other load"]


@pytest.mark.parametrize(
    ("key", "ours", "theirs"),
    [
        ("tokenizer_model", "gpt2", "llama"),
        ("hidden_dropout", 0.0, 0.1),
        ("clip_grad", 1.0, 0.3),
        ("adam_eps", 1e-8, 1e-5),
        ("moe_z_loss_coeff", 0.0, 1e-3),
        ("moe_aux_loss_coeff", 0.0, 1e-2),
        ("reset_attention_mask", False, True),
        ("grad_reduce_in_fp32", True, False),
        ("accumulate_allreduce_grads_in_fp32", True, False),
        ("world_size", 8, 16),
    ],
)
def test_settings_of_other_trainings_are_unfair_by_name(key: str, ours: Any, theirs: Any) -> None:
    sides = [change_settings(make_result(name), **{key: value}) for name, value in (("a", ours), ("b", theirs))]
    verdict = judge(*sides)
    assert (verdict.status, list_unfair(verdict)) == ("unfair", [f"setting {key}"])
    tuned = judge(*sides, "tuned")
    assert tuned.status == ("fair" if key == "world_size" else "unfair"), "each side chooses how the work is divided"


@pytest.mark.parametrize("key", ["hidden_dropout", "moe_z_loss_coeff", "reset_attention_mask"])
def test_a_setting_that_one_side_has_on_and_the_other_does_not_state_is_not_fair(key: str) -> None:
    verdict = judge(make_result(), change_settings(make_result("megatron"), **{key: 0.1}))
    assert verdict.status == "not shown" and f"setting {key}" in verdict.list_reasons()[0]
    assert judge(make_result(), change_settings(make_result("megatron"), **{key: 0.0})).status == "fair"


def test_tokens_that_are_equal_must_be_counted_equally() -> None:
    fewer = change_steps(make_result("jax"), tokens=[0.75 * count for count in make_result().steps.tokens])
    verdict = judge(make_result(), fewer)
    assert (verdict.status, list_unfair(verdict)) == ("unfair", ["tokens"])
    unknown = change_steps(make_result("jax"), tokens=[None] * 60)
    assert judge(make_result(), unknown).status == "fair", "a count that is not stated is not another one"


def test_attention_that_is_not_fused_on_one_side_only_is_not_fair() -> None:
    def judge_kinds(ours: str | None, theirs: str, chosen: Any = "identical") -> PairVerdict:
        a = make_result("megatron") if ours is None else change_settings(make_result("megatron"), attention=ours)
        return judge(a, change_settings(make_result("huggingface"), attention=theirs), chosen)

    assert judge_kinds("flash", "sdpa").status == "fair"
    assert judge_kinds("unfused", "eager").status == "fair"
    assert list_unfair(judge_kinds("auto", "eager")) == ["setting unfused_attention"]
    assert judge_kinds("auto", "eager", "tuned").status == "fair"
    assert judge_kinds(None, "eager").list_reasons()[0].startswith("setting unfused_attention")
    assert judge_kinds(None, "sdpa").status == "fair"


def test_the_class_tuned_lets_each_side_choose_how_it_computes_but_not_what() -> None:
    fair = make_result()
    tuned = change_settings(make_result("torchtitan"), recompute_activations=True, micro_batch_size=4)
    verdict = judge(fair, tuned, "tuned")
    assert verdict.status == "fair"
    assert {c.rule for c in verdict.checks if c.judgement == "tuned"} == {
        "setting recompute",
        "setting micro_batch_size",
    }
    assert judge(fair, change_settings(tuned, global_batch_size=4), "tuned").status == "unfair"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda each: change_inputs(each, tokens=None), "tokens"),
        (lambda each: structs.replace(each, precision=""), "precision used"),
        (lambda each: change_steps(each, time_s=[]), "measured steps"),
        (lambda each: change_steps(each, loss=[]), "loss curves"),
        (
            lambda each: structs.replace(each, settings={k: v for k, v in each.settings.items() if k != "lr"}),
            "setting lr",
        ),
    ],
)
def test_a_fact_that_a_side_does_not_state_is_not_shown_and_the_pair_not_fair(change: Change, rule: str) -> None:
    verdict = judge(make_result(), change(make_result("torchtitan")))
    assert verdict.status == "not shown"
    assert any(reason.startswith(rule) for reason in verdict.list_reasons())


def test_facts_about_the_machine_that_are_not_measured_are_listed_and_do_not_decide() -> None:
    verdict = judge(structs.replace(make_result(), load=ResultLoad()), make_result("torchtitan"))
    unknown = {check.rule for check in verdict.checks if check.judgement == "not shown"}
    assert verdict.status == "fair"
    assert {"clocks", "throttling", "other load"} <= unknown
    hot = ResultLoad(samples=[LoadSample(time=IN_STEPS, throttled=["hbm_thermal"], device_clock_mhz=[2500.0])])
    assert list_unfair(judge(structs.replace(make_result(), load=hot), make_result("jax"))) == ["throttling"]


def test_clocks_of_devices_decide_and_those_of_hosts_do_not() -> None:
    def sample(**clocks: Any) -> ResultLoad:
        return ResultLoad(samples=[LoadSample(time=IN_STEPS, **clocks)], other_cpu_share=0.0)

    for clocks, expected in (({"device_clock_mhz": [2000.0]}, "unfair"), ({"cpu_mhz": 2000.0}, "not shown")):
        faster = {name: [2100.0] if isinstance(clock, list) else 2100.0 for name, clock in clocks.items()}
        sides = [structs.replace(make_result(), load=sample(**each)) for each in (clocks, faster)]
        check = next(each for each in judge(*sides).checks if each.rule == "clocks")
        assert check.judgement == expected


def test_initial_weights_without_a_hash_are_shown_by_the_first_loss_on_the_same_tokens() -> None:
    bare = change_inputs(make_result("torchtitan"), weights=None)
    check = next(c for c in judge(make_result(), bare).checks if c.rule == "initial weights")
    assert check.judgement == "equivalent"
    other = change_steps(bare, loss=[6.3, *bare.steps.loss[1:]])
    check = next(c for c in judge(make_result(), other).checks if c.rule == "initial weights")
    assert check.judgement == "not shown"


def test_padding_outside_of_the_softmax_is_fair_between_engines_and_not_within_one() -> None:
    padded = change_settings(make_result("megatron"), vocab_rows=512)
    assert judge(make_result("native"), padded).status == "fair"
    assert "setting vocab_rows" in list_unfair(judge(make_result("megatron"), padded))


def test_names_and_values_of_frameworks_are_equivalent_where_they_mean_the_same() -> None:
    ours = translate_settings({"lr_warmup_iters": 50, "bf16": True, "optimizer": "adam"}, "mega", is_own_loop=False)
    nemo = {"optim.lr_scheduler.warmup_steps": 49, "trainer.precision": "bf16-mixed", "optim.config.optimizer": "adam"}
    assert translate_settings(nemo, "nemo", is_own_loop=True) == ours
    selective = translate_settings({"recompute_activations": True}, "megatron", is_own_loop=True)
    whole = translate_settings({"recompute_activations": True}, "megatron", is_own_loop=False)
    assert (selective["recompute"], whole["recompute"]) == ("selective", "full")
    padded = {"vocab_size": 128256, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 8}
    assert translate_settings(padded, "megatron", is_own_loop=True)["padded_vocab_size"] == 129024
    assert translate_settings(padded, "megatron", is_own_loop=False)["padded_vocab_size"] == 128256


def test_a_log_of_megatron_prints_the_rate_of_the_next_step() -> None:
    log = structs.replace(make_result("megatron"), source="log")
    printed = change_steps(log, learning_rate=make_result().steps.learning_rate)
    verdict = judge(make_result(), printed)
    check = next(c for c in verdict.checks if c.rule == "learning rates")
    assert (check.judgement, check.reason) == ("unfair", "the schedule of b is one step late")


@pytest.mark.parametrize(
    ("factor", "judgement"), [(1 + 2e-7, "same"), (1 + 5e-6, "same"), (1 + 2e-5, "unfair"), (1.005, "unfair")]
)
def test_learning_rates_differ_by_more_than_the_digits_that_logs_print(factor: float, judgement: str) -> None:
    other = change_steps(make_result("jax"), learning_rate=[factor * make_rate(n) for n in range(1, 61)])
    check = next(c for c in judge(make_result(), other).checks if c.rule == "learning rates")
    assert check.judgement == judgement


def test_equal_rates_at_every_step_make_settings_of_the_schedule_equivalent() -> None:
    verdict = judge(make_result(), change_settings(make_result("jax"), lr_warmup_iters=4))
    check = next(c for c in verdict.checks if c.rule == "setting lr_warmup_iters")
    assert (check.judgement, verdict.status) == ("equivalent", "fair")


def test_settings_that_no_rule_knows_are_not_shown() -> None:
    sides = [change_settings(make_result(name), flux=number) for number, name in enumerate(("native", "jax"))]
    verdict = judge(*sides)
    assert verdict.list_reasons() == ["setting flux: no rule says what this setting changes"]


def test_every_setting_of_the_schema_has_a_rule_and_no_rule_is_doubled() -> None:
    rules = read_fairness_rules()
    assert {key for key in OWNERS if rules.find_rule(key) is None} == RESOLVED
    keys = [key for rule in rules.settings for key in rule.keys]
    assert len(keys) == len(set(keys))


def test_losses_are_of_the_same_training_within_the_spread_of_seeds() -> None:
    def curve(phase: float, drift: float = 0.0) -> dict[int, float]:
        return {step: 6 - 0.01 * step + 0.05 * math.sin(step + phase) + drift * max(0, step - 40)
                for step in range(1, 101)}  # fmt: skip

    spread = estimate_loss_spread([curve(0), curve(1), curve(2)])
    assert spread is not None
    assert compare_loss_curves(curve(0), curve(0.5), spread).is_equal
    found = compare_loss_curves(curve(0), curve(0, drift=0.02), spread)
    assert found.is_equal is False and found.diverges_at is not None and 40 <= found.diverges_at <= 50
    assert compare_loss_curves(curve(0), curve(0.5), None, "fp32").is_equal is None
    assert compare_loss_curves(curve(0), {1: 5.99 + 0.05 * math.sin(1) + 2e-6}, None, "fp32").is_equal
    assert compare_loss_curves(curve(0), {**curve(0), 7: math.nan}, spread).is_equal is False


def test_losses_of_one_seed_are_equal_far_below_their_own_noise_from_batch_to_batch() -> None:
    rng = random.Random(1)
    curve = {step: 6 - 0.01 * step + 0.1 * rng.gauss(0, 1) for step in range(1, 41)}

    def shift(start: int, gap: float) -> dict[int, float]:
        return {step: loss + (gap if step >= start else 0.0) for step, loss in curve.items()}

    assert compare_loss_curves(curve, shift(1, 2e-4), None, "fp32").is_equal
    assert compare_loss_curves(curve, shift(1, 2e-2), None, "fp32").is_equal is None
    # Small on average, and not at its end.
    assert compare_loss_curves(curve, shift(31, 1.5e-2), None, "fp32").is_equal is None
    smooth = {step: 6 - 0.01 * step for step in curve}
    other = {step: loss + 2e-4 for step, loss in smooth.items()}
    assert compare_loss_curves(smooth, other, None, "fp32").is_equal is None, "without noise, nothing is known of seeds"


def test_inputs_of_other_tokenizers_are_unfair() -> None:
    other = change_inputs(make_result("jax"), tokenizer="gpt2")
    assert isinstance(other.inputs, ResultInputs)
    assert list_unfair(judge(make_result(), other)) == ["setting tokenizer_hash"]


LOOP, KERNEL = "optimizer_implementation", "attention_kernel"


def test_what_an_engine_really_did_is_compared_whatever_its_configuration_says() -> None:
    plain = change_engine(make_result(), recompute_activations=False)
    full = change_engine(make_result(seed=1), recompute_activations=True, **{"activation_checkpoint.mode": "full"})
    full = structs.replace(full, chosen_settings=["activation_checkpoint.mode"])
    assert list_unfair(judge(plain, full)) == ["setting recompute"]
    assert not list_unfair(judge(plain, full, "tuned")), "a tuned side chooses it"


@pytest.mark.parametrize("key", [LOOP, KERNEL, "moment_dtype", "precision.norm"])
def test_two_engines_have_their_own_parts_and_two_runs_of_one_engine_the_same(key: str) -> None:
    def pair(*frameworks: str) -> list[str]:
        sides = [change_engine(make_result(each, seed=n), **{key: f"kind {n}"}) for n, each in enumerate(frameworks)]
        return list_unfair(judge(*sides))

    assert pair("native", "torchtitan") == []
    assert pair("torchtitan", "torchtitan") == [f"setting {key}"]


def test_a_part_that_one_engine_was_asked_for_is_no_part_of_its_own() -> None:
    path = "optimizer.implementation"
    native = change_engine(make_result("native"), **{LOOP: "fused"})
    asked = change_engine(make_result("torchtitan", seed=1), path, **{LOOP: "for-loop", path: "for-loop"})
    assert list_unfair(judge(native, asked)) == [f"setting {LOOP}"]
    same = change_engine(make_result("torchtitan", seed=1), path, **{LOOP: "fused", path: "fused"})
    assert list_unfair(judge(native, same)) == []


def test_a_setting_of_one_engine_that_the_other_does_not_state_is_not_shown_to_be_fair() -> None:
    asked = change_engine(make_result("torchtitan", seed=1), "parallelism.enable_x", **{"parallelism.enable_x": True})
    verdict = judge(make_result("native"), asked)
    (check,) = [check for check in verdict.checks if check.rule == "setting parallelism.enable_x"]
    assert (check.judgement, verdict.status) == ("not shown", "not shown")
    assert judge(make_result("native"), asked, "tuned").status == "fair"


def test_compilation_in_force_outranks_what_was_asked_for() -> None:
    auto = change_engine(change_settings(make_result(), compile="auto"), compiled=False)
    off = change_engine(change_settings(make_result(seed=1), compile=False), compiled=False)
    assert list_unfair(judge(auto, off)) == []
    on = change_engine(change_settings(make_result(seed=1), compile="auto"), compiled=True)
    assert list_unfair(judge(auto, on)) == ["setting compiled"]
