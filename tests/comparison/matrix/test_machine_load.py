"""The machine during a run: energy of its devices and processors, processes that are not of the run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec import structs
from tests.comparison.fair_results import START, TOKENS, make_result
from tests.machine.test_health import LISTED, METRIC, amd_smi, machine

from primus.comparison.fairness.evidence import collect_evidence
from primus.comparison.matrix import machine_load
from primus.comparison.matrix.machine_load import (
    EnergyCounter,
    LoadRecorder,
    count_throttling,
)
from primus.comparison.results.result import LoadSample, ResultLoad
from primus.comparison.speed.efficiency import compute_joules_per_million_tokens
from primus.machine.facts import MachineFacts


def test_power_of_gpus_and_processes_of_others_are_recorded(tmp_path: Path) -> None:
    def list_process(pid: int, name: str, used: int) -> dict[str, object]:
        memory = {"vram_mem": {"value": used, "unit": "B"}}
        return {"process_info": {"pid": pid, "name": name, "memory_usage": memory}}

    processes = [list_process(42, "other", 1 << 30), list_process(43, "monitor", 0)]
    environ = amd_smi(
        tmp_path,
        list=LISTED,
        metric={"gpu_data": [{"gpu": 0, **METRIC}, {"gpu": 1, **METRIC}]},
        process=[{"gpu": 0, "process_list": processes}],
        bad_pages=[],
        static={"gpu_data": []},
    )
    with LoadRecorder(machine(), environ) as recorder:
        pass  # a run too short for a second sample
    load = recorder.summarize_load()
    assert load.samples[0].device_power_w == [239, 239]
    assert load.samples[0].device_energy_j == [1245.662, 1245.662]
    assert (load.energy_source, load.other_gpu_processes) == ("amd-smi", ["other 42"])
    assert collect_evidence(structs.replace(make_result(), load=load), "a").other_load == 1.0


def test_energy_is_that_of_the_devices_that_trained() -> None:
    """Ten seconds of 300 W on two GPUs, and of 40 W on the host."""
    samples = [
        LoadSample(time=START + second, device_power_w=[100.0, 200.0], host_energy_j=40.0 * second)
        for second in range(10)
    ]
    run = structs.replace(make_result(), load=ResultLoad(samples=samples))
    seconds = (run.steps.ended[-1] or 0) - (run.steps.ended[10] or 0)
    tokens = TOKENS * 49
    host = compute_joules_per_million_tokens([run], 10)
    assert host == pytest.approx(40 * seconds / tokens * 1e6)
    run = structs.replace(run, platform="amd")
    assert compute_joules_per_million_tokens([run], 10) == pytest.approx(300 * seconds / tokens * 1e6)
    one = structs.replace(run, gpu_info=structs.replace(run.gpu_info, device_count=1))
    assert compute_joules_per_million_tokens([one], 10) is None, "the power of another GPU is not that of the run"


def test_energy_counters_of_gpus_count_before_their_power() -> None:
    samples = [
        LoadSample(
            time=START + second,
            device_power_w=[100.0, 200.0],
            device_energy_j=[1e6 + 350.0 * second, 2e6 + 250.0 * second] if second % 5 == 0 else [],
        )
        for second in range(16)
    ]
    run = structs.replace(make_result(), load=ResultLoad(samples=samples), platform="amd")
    seconds = (run.steps.ended[-1] or 0) - (run.steps.ended[10] or 0)
    assert compute_joules_per_million_tokens([run], 10) == pytest.approx(600 * seconds / (TOKENS * 49) * 1e6)


def write_domain(folder: Path, name: str, energy_uj: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(name + "\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text("262143328850\n")
    return folder / "energy_uj"


def test_energy_is_that_of_the_packages_since_the_first_reading_and_counters_wrap_around(tmp_path: Path) -> None:
    first = write_domain(tmp_path / "intel-rapl:0", "package-0", 0)
    second = write_domain(tmp_path / "intel-rapl:1", "package-1", 262_143_000_000)
    inner = [
        write_domain(tmp_path / f"intel-rapl:{place}", name, 5)
        for place, name in (("0:0", "core"), ("0:1", "dram"), ("2", "psys"))
    ]
    counter = EnergyCounter(tmp_path)
    assert counter.read_joules() == 0
    first.write_text("30000000\n")
    for path in inner:
        path.write_text("900000000\n")
    assert counter.read_joules() == pytest.approx(30)
    second.write_text("1000000\n")
    assert counter.read_joules() == pytest.approx(30 + 1.32885)
    second.unlink()
    first.write_text("40000000\n")
    assert counter.read_joules() == pytest.approx(40 + 1.32885), "a counter that is lost keeps what it had"
    assert EnergyCounter(tmp_path / "none").read_joules() is None


def test_clocks_and_throttling_are_those_of_all_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "CPUS", tmp_path)
    for number, khz, count in ((0, 2_000_000, 4), (1, 3_000_000, 5)):
        for name, value in (("cpufreq/scaling_cur_freq", khz), ("thermal_throttle/core_throttle_count", count)):
            (tmp_path / f"cpu{number}" / name).parent.mkdir(parents=True)
            (tmp_path / f"cpu{number}" / name).write_text(f"{value}\n")
    assert count_throttling() == 9
    with LoadRecorder(MachineFacts(), {}) as recorder:
        pass
    (sample,) = recorder.summarize_load().samples
    assert sample.cpu_mhz == 2500 and sample.throttled == []


def test_values_of_gpus_are_in_the_sample_that_read_them_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "HOST_INTERVAL_S", 0.001)
    has_three = threading.Event()
    calls = 0

    def count_no_throttling() -> int:
        nonlocal calls
        calls += 1  # once before the first sample, and once in each
        if calls > 3:
            has_three.set()
        return 0

    monkeypatch.setattr(machine_load, "count_throttling", count_no_throttling)
    devices = {"gpu_data": [{"gpu": 0, **METRIC}, {"gpu": 1, **METRIC}]}
    environ = amd_smi(tmp_path, list=LISTED, metric=devices, process=[], bad_pages=[], static={"gpu_data": []})
    with LoadRecorder(machine(), environ) as recorder:
        assert has_three.wait(60)
    first, second, third = recorder.summarize_load().samples[:3]
    assert first.device_power_w == [239, 239] and second.device_power_w == third.device_power_w == []
