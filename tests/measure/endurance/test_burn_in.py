"""A device that computes, keeps or clocks otherwise under load is found, on devices with simulated faults."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from fakes import tools
from fakes.nodes import node as build_facts
from measure.network.test_communication import codes, started
from primus.frameworks import native
from primus.machine import measurements
from primus.machine.facts import MachineFacts
from primus.machine.health import DeviceHealth
from primus.machine.measurements import BurnIn, MeasurementResults
from primus.measure.devices import telemetry
from primus.measure.endurance import burn_in
from primus.measure.endurance.burn_in import BurnInLoad
from primus.measure.kernels import gemm
from primus.measure.timing import HostClock
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.performance import judge as performance
from primus.preflight.performance.baselines import Demands
from primus.runs.files import read_json

pytestmark = pytest.mark.native
CPU = torch.device("cpu")
MEMORY = 4 * 2**20


def burn(multiply: gemm.Multiply = gemm.multiply_matrices, dtype: gemm.Dtype = "fp32", seconds: float = 0.3) -> BurnIn:
    return burn_in.run(CPU, HostClock(), BurnInLoad(64, dtype, MEMORY, multiply), seconds)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_healthy_device_repeats_its_products_bit_by_bit(dtype: gemm.Dtype) -> None:
    found = burn(dtype=dtype, seconds=1.0)
    assert (found.wrong_words, found.wrong_memory, found.wrong_at_first, found.first_wrong_s) == (0, 0, 0, None)
    assert found.products >= len(found.windows) >= 1
    assert found.duration_s >= 1.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_flipped_bit_in_one_product_is_found(dtype: gemm.Dtype) -> None:
    calls = 0

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        nonlocal calls
        gemm.multiply_matrices(a, b, out)
        calls += 1
        if calls == 7:
            out.view(burn_in.WORDS[out.itemsize])[5, 3] ^= 1  # the least significant bit, far below any tolerance

    found = burn(multiply, dtype)
    assert found.wrong_words == 1
    assert found.first_wrong_s is not None


@pytest.mark.parametrize("pattern", burn_in.PATTERNS)
def test_a_word_that_lost_its_pattern_is_counted(pattern: int | None) -> None:
    memory = torch.empty(1000, dtype=torch.int32)
    burn_in._fill_memory(memory, pattern)
    assert burn_in.count_wrong(memory, pattern) == 0
    memory[17] ^= 1 << 9
    memory[998] = memory[996]  # a wrong address gives a word of another place
    assert burn_in.count_wrong(memory, pattern) == (2 if pattern is None else 1)


def test_a_checksum_changes_with_each_word_and_its_place() -> None:
    words = torch.arange(-500, 500, dtype=torch.int32)
    changed, swapped = words.clone(), words.clone()
    changed[3] ^= 1
    swapped[[3, 4]] = words[[4, 3]]
    assert len({burn_in.compute_checksum(one) for one in (words, changed, swapped)}) == 3
    assert burn_in.compute_checksum(words.view(10, 100)) == burn_in.compute_checksum(words)


def test_a_burn_in_ends_when_it_is_stopped() -> None:
    # A window is a twelfth of the time: of a minute, the test takes five seconds.
    found = burn_in.run(CPU, HostClock(), BurnInLoad(32, "fp32", 8, _tiny), 60, is_stopped=lambda: True)
    assert len(found.windows) == 1


def _tiny(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    gemm.multiply_matrices(a, b, out)


def test_the_reference_training_repeats_itself_and_notices_one_weight() -> None:
    from primus.frameworks.native.engine import reference, step

    torch.set_num_threads(1)
    first = native.train_reference(CPU)
    assert native.train_reference(CPU) == first
    real = step.train_step

    def flip_a_bit(trainable: step.Trainable, *args: object, **kwargs: object) -> step.StepResult:
        with torch.no_grad():
            trainable.model.norm.weight.view(torch.int32)[0] ^= 1
        return real(trainable, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "train_step", flip_a_bit)
        assert native.train_reference(CPU)[0] != first[0]


def findings(folder: Path) -> list[CheckFinding]:
    """What a preflight says of the processes in `folder`."""
    results = read_json(folder / measurements.FILE, MeasurementResults)
    return performance.judge_results(results, MachineFacts(), Demands())


def test_of_four_processes_the_ones_with_faults_are_named(tmp_path: Path) -> None:
    with started(tmp_path, "soak", "2,2") as process:
        assert codes(process) == [0] * 4, "\n".join(path.read_text() for path in tmp_path.glob("*.out"))
    bad = {(one.check, one.subject) for one in findings(tmp_path) if one.status == "fail"}
    assert bad == {
        ("performance.burn_in", "rank 1"),  # flips a bit of one product
        ("performance.quickstart", "rank 2"),  # trains to other weights, in the same way each time
        ("performance.quickstart", "rank 3"),  # trains to other weights each time
    }


NVIDIA = """\
n=$(cat {count} 2>/dev/null || echo 0)
echo $((n + 1)) > {count}
case "$1" in --query-gpu=*) ;; *) exit 0 ;; esac
IFS=, read -ra names <<< "${{1#--query-gpu=}}"
echo "${{names[*]}}" | sed 's/ /, /g'
for card in 0 1; do
  row=""
  for name in "${{names[@]}}"; do
    case $name in
      pci.bus_id) value=0000000$(printf '0:%02x:00.0' $((5 + 16 * card))) ;;
      clocks_event_reasons.active) [ $card = 1 ] && value=0x0000000000000040 || value=0x0000000000000000 ;;
      clocks.sm) [ $card = 1 ] && value="900 MHz" || value="1980 MHz" ;;
      power.draw) value="690.00 W" ;;
      temperature.gpu) [ $card = 1 ] && value=93 || value=65 ;;
      ecc.errors.uncorrected.volatile.total) value=0 ;;
      *) value="[N/A]" ;;
    esac
    row="$row, $value"
  done
  echo "${{row#, }}"
done
"""


def test_memory_errors_from_before_the_load_are_not_its_own() -> None:
    samples = [DeviceHealth(index=0, ecc_uncorrectable=count) for count in (3, 3, 5)]
    assert telemetry.summarize_device(0, samples).new_uncorrectable == 2
    assert telemetry.summarize_device(0, samples[:2]).new_uncorrectable == 0
    assert telemetry.summarize_device(0, [DeviceHealth(index=0)]).new_uncorrectable is None


def test_telemetry_is_sampled_while_the_load_runs(tmp_path: Path) -> None:
    count = tmp_path / "count"
    environ = {**os.environ, **tools.tool(tmp_path / "bin", "nvidia-smi", NVIDIA.format(count=count))}
    environ["PATH"] += f":{os.environ['PATH']}"
    facts = build_facts(num_cards=2, model="H100", num_links=18)
    with telemetry.TelemetrySampler(telemetry.create_reader(facts, environ), 0.6) as sampler:
        for _ in range(500):
            if len(sampler.summarize_telemetry()) == 2 and sampler.summarize_telemetry()[0].num_samples > 1:
                break
            burn(seconds=0.02)
    healthy, throttled = sampler.summarize_telemetry()
    assert healthy.num_samples > 1
    assert (healthy.clock_mean_mhz, healthy.power_max_w, healthy.throttled) == (1980.0, 690.0, {})
    assert throttled.throttled == {"hw_thermal_slowdown": throttled.num_samples}
    assert (throttled.clock_min_mhz, throttled.temperature_max_c, throttled.new_uncorrectable) == (900.0, 93.0, 0)


def test_only_cards_that_the_process_may_use_are_sampled(tmp_path: Path) -> None:
    environ = {**os.environ, **tools.tool(tmp_path / "bin", "nvidia-smi", NVIDIA.format(count=tmp_path / "count"))}
    environ |= {"PATH": f"{environ['PATH']}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "1"}
    facts = build_facts(num_cards=2, model="H100", num_links=18)
    assert [one.index for one in telemetry.create_reader(facts, environ)()] == [1]
    assert json.loads((tmp_path / "count").read_text()) >= 1
