"""A real run becomes a result with everything that a fair comparison needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.cli.main import main
from primus.comparison.folder.archive import load_results

EXPERIMENT = """\
exp_name: base
workspace: output
modules:
  pre_trainer:
    framework: native
    model: tiny
    overrides: {mock_data: true, seq_length: 16, bf16: false, lr: 1.0e-2, seed: 7}
"""
MATRIX = """\
name: real
experiment: base.yaml
platforms: {cpu: {processes: 1}}
frameworks: [native]
models: {tiny: {preset: tiny}}
settings: {train_iters: 4, global_batch_size: 4, micro_batch_size: 1, eval_interval: 2, eval_iters: 1}
tuned: {may_change: [micro_batch_size], choices: [{settings: {micro_batch_size: 4}}]}
repetitions: 1
"""


@pytest.mark.native
@pytest.mark.slow
def test_two_classes_of_a_cell_differ_in_what_was_tuned_and_train_on_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base.yaml").write_text(EXPERIMENT)
    (tmp_path / "real.yaml").write_text(MATRIX)
    monkeypatch.chdir(tmp_path)
    assert main(["direct", "--", "compare", "run", "--matrix", "real.yaml"]) == 0
    identical, tuned = load_results([tmp_path / "output/real"]).results
    assert (identical.cell.settings_class, tuned.cell.settings_class) == ("identical", "tuned")
    assert (identical.training_config.micro_batch_size, tuned.training_config.micro_batch_size) == (1, 4)
    assert (identical.engine_settings["num_micro_batches"], tuned.engine_settings["num_micro_batches"]) == (4, 1)
    assert identical.inputs.tokens is not None and len(set(identical.inputs.tokens)) == 4
    assert identical.inputs == tuned.inputs, "the fingerprints do not depend on how a batch is divided"
    assert identical.inputs.weights_origin == "seed 7" and identical.inputs.weights
    assert identical.steps.loss == pytest.approx(tuned.steps.loss, abs=1e-5)
    settings = identical.engine_settings
    assert settings["parameters"] == settings["decayed_parameters"] + settings["undecayed_parameters"]
    assert settings["undecayed_parameters"] > 0, "norms do not decay"
    assert (settings["weight_decay"], settings["seq_length"], identical.precision) == (0.1, 16, "float32")
    # Python collects garbage at any time, so only evaluations are known.
    evaluations = [each.step for each in identical.interruptions if each.kind == "evaluation"]
    assert evaluations == [2, 4]
    assert identical.flops.convention == "causal"
    assert identical.flops.by_convention["causal"] == identical.flops.flops_per_token
    assert identical.load.samples and identical.load.other_cpu_share is not None
    assert identical.machine.cpu_cores and identical.versions["torch"] and identical.packages["torch"]
    assert identical.notes == []
