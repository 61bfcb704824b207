"""The machine during a run: energy of its GPUs by their power, and processes that are not of the run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec import structs
from tests.comparison.fair_results import START, TOKENS, make_result
from tests.machine.test_health import LISTED, METRIC, amd_smi, machine

from primus.comparison.efficiency import compute_joules_per_million_tokens
from primus.comparison.evidence import collect_evidence
from primus.comparison.machine_load import LoadRecorder
from primus.comparison.result import LoadSample, ResultLoad


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
        time.sleep(0.1)  # a run, of which the recorder takes a sample
    load = recorder.summarize_load()
    assert load.samples[0].device_power_w == [239, 239]
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
