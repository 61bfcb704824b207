"""Reports of runs whose figures are known: shares of time, what limits them, and what is suggested."""

from __future__ import annotations

import html
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import browser

pytest.importorskip("numpy")

from primus.comparison.results.run_result import NO_SYSTEM
from primus.machine.facts import Device, MachineFacts
from primus.report.benchmark_history import find_history_file
from primus.run_report.facts import collect_facts
from primus.run_report.html_page import format_html
from primus.run_report.markdown import format_markdown, format_text
from primus.run_report.report import RunReport, build_report, list_tables
from primus.runs.files import write_json, write_text
from primus.runs.snapshot import SystemInfo
from primus.runs.store import Run, RunOutcome
from traces.chrome_trace import TraceWriter

MakeRun = Callable[..., Run]


def list_changes(report: RunReport) -> dict[str, float | None]:
    return {change.change.split(",")[0]: change.gain for change in report.changes}


def test_waiting_for_data_limits_a_run_and_the_estimate_is_the_wait(make_run: MakeRun) -> None:
    report = build_report(make_run([(1.0, 0.4)] * 40, settings={"num_workers": 2}))
    assert report.limit == "the input: 40% of the time of steps is spent waiting for batches"
    assert list_changes(report) == {"raise num_workers above 2": pytest.approx(0.4)}
    shares = {part.what: part.seconds for part in report.facts.time}
    assert shares == {"steps": pytest.approx(24), "waiting for data": pytest.approx(16), "start": pytest.approx(10)}
    assert report.facts.tokens_per_s == pytest.approx(1000)


def test_facts_are_those_of_the_events(make_run: MakeRun) -> None:
    straggler = {"kind": "straggler", "rank": 3, "host": "node-1"}
    profile = {"kind": "profile", "first_step": 21, "last_step": 24}
    run = make_run(
        [(0.5, 0.1)] * 20 + [(2.0, 0.1)] * 4 + [(0.25, 0.0)] * 16,
        started={"versions": {"torch": "2.13.0"}, "device": "EPYC"},
        after=[straggler, profile],
    )
    facts = build_report(run).facts
    assert facts.overall_tokens_per_s == pytest.approx(40 * 1000 / (10 + 8 + 4))
    assert (facts.tokens_per_s, facts.tokens_per_s_low, facts.tokens_per_s_high) == (2000, 2000, 4000)
    assert facts.stragglers == ["rank 3 on node-1"]
    assert facts.machine == {"device": "EPYC", "torch": "2.13.0"}
    assert facts.wall_s == pytest.approx(32) and sum(part.share for part in facts.time) == pytest.approx(1)


def test_a_run_on_a_busy_host_lacks_cores_and_reaches_little_of_the_measured_product(
    make_run: MakeRun, tmp_path: Path
) -> None:
    started = {"device_type": "cpu", "dtype": "float32", "device": "EPYC"}
    run = make_run(
        [(1.0, 0.0)] * 30,
        started=started,
        tflops_per_device=0.05,
        after=[{"kind": "training_ended", "core_wait_share": 0.6}],
    )
    write_json(run.directory / "env/system_info.json", structs.replace(NO_SYSTEM, host=socket.gethostname()))
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    case = {"M": 64, "N": 64, "K": 64, "trans": "NN", "dtype": "fp32", "mode": "steady"}
    record = {**case, "benchmark": "gemm", "device": "CPU", "rank": 0, "value": 0.5, "unit": "TFLOP/s"}
    write_text(find_history_file("gemm", environ), json.dumps(record) + "\n")
    report = build_report(run, environ)
    assert report.limit == "too few cores: threads that could run waited 60% of that time for one"
    assert [change.gain for change in report.changes] == [0.6]
    assert "10.0% of 0.5 TFLOP/s (benchmark gemm)" in format_markdown(report)
    assert build_report(run).best_gemm_tflops is None
    edited = [{"kind": "training_ended", "core_wait_share": value} for value in (99, "lots")]
    run = make_run([(1.0, 0.0)] * 30, started=started, after=edited, name="20231114_221320-0001")
    assert build_report(run).facts.core_wait_share is None


def test_evaluations_and_slow_first_steps_have_their_share(make_run: MakeRun) -> None:
    evaluation = {"kind": "eval", "step": 40, "loss": 4.6, "time_s": 50.0}
    steps = [(11.0, 0.0), *[(1.0, 0.0)] * 39]
    report = build_report(make_run(steps, settings={"eval_interval": 10}, after=[evaluation]))
    assert report.facts.wall_s == pytest.approx(10 + 50 + 50)
    found = list_changes(report)
    assert found["raise eval_interval above 10"] == pytest.approx(50 / 110 / 2)
    once = build_report(
        make_run(steps, settings={"eval_interval": 100}, after=[evaluation], name="20231114_221320-0001")
    )
    assert not any("eval_interval" in change for change in list_changes(once))
    assert found["warm the caches of kernels and data up once"] == pytest.approx(10 / 110)
    sample = {"kind": "sample", "tokens": 12, "time_s": 150.0}
    slept = build_report(make_run(steps, after=[sample], name="20231114_221320-0002"))
    assert slept.limit == "most of the run's time is not training: text sample takes 71%"


def test_checkpoints_cost_what_training_waits_and_what_steps_during_the_writing_take_longer(make_run: MakeRun) -> None:
    # Of the last ten steps, which take 2 s instead of 1 s, all are taken while a checkpoint is written.
    steps = [(1.0, 0.0)] * 30 + [(2.0, 0.0)] * 10
    saved = {"kind": "checkpoint_saved", "step": 30, "name": "step_30", "bytes": 1, "time_s": 25.0, "wait_s": 5.0}
    settings = {"save_interval": 30, "async_save": True}
    report = build_report(make_run(steps, settings=settings, after=[saved], name="20231114_221320-0001"))
    assert report.facts.checkpoint_wait_s == 5.0
    assert report.facts.slow_saving_s == pytest.approx(10.0)
    assert list_changes(report)["raise save_interval above 30"] == pytest.approx(15 / report.facts.wall_s / 2)
    assert {part.what: part.seconds for part in report.facts.time}["checkpoints"] == 5.0
    blocking = {**saved, "time_s": 20.0, "wait_s": 20.0}
    report = build_report(make_run(steps[:30], settings={**settings, "async_save": False}, after=[blocking]))
    assert list_changes(report)["set async_save: true"] == pytest.approx(20 / report.facts.wall_s)
    assert report.facts.slow_saving_s == 0.0
    old = {name: value for name, value in blocking.items() if name != "wait_s"}
    report = build_report(
        make_run(steps[:30], settings={**settings, "async_save": False}, after=[old], name="20231114_221321-0002")
    )
    assert "checkpoints, end and pauses" in {part.what for part in report.facts.time}


def test_an_impossible_mfu_is_refused_and_the_convention_of_flops_is_recognized(make_run: MakeRun) -> None:
    from primus.config.extended_files import load_model
    from primus.models.counts import flops_per_token

    full = flops_per_token(load_model("tiny"), 128, "full")
    report = build_report(
        make_run([(1.0, 0.0)] * 9, settings={"seq_length": 128}, mfu=1.7, tflops_per_device=1000 * full / 1e12)
    )
    assert report.facts.mfu is None
    assert "the MFU of the run, 1.70, is not possible" in report.facts.notes[0]
    assert report.facts.convention == "full"
    report = build_report(make_run([(1.0, 0.0)] * 9, tflops_per_device=1000 * full / 1e12 * 1.5))
    assert report.facts.convention == ""
    assert "which no convention gives for its model" in report.facts.notes[0]


def test_recomputation_with_free_memory_is_named(make_run: MakeRun) -> None:
    run = make_run(
        [(1.0, 0.0)] * 9,
        settings={"recompute_activations": True},
        started={"device_type": "cuda", "dtype": "bfloat16"},
        memory_gib=60.0,
        mfu=0.2,
    )
    device = Device(index=0, vendor="amd", memory_bytes=192 << 30)
    system = SystemInfo(
        host="", kernel="", architecture="", python="", cpu_model="", cpu_cores=8, memory_bytes=1 << 40,
        devices=["MI300X"], facts=MachineFacts(devices=(device,)),
    )  # fmt: skip
    write_json(run.directory / "env/system_info.json", system)
    report = build_report(run)
    assert "60.00 of 192.0 GiB" in format_text(report)
    assert list_changes(report) == {"set recompute_activations: false": 0.25, "raise micro_batch_size above 1": None}


def test_a_profile_says_what_steps_wait_for(make_run: MakeRun) -> None:
    run = make_run([(1.0, 0.0)] * 30, after=[{"kind": "profile", "first_step": 5, "last_step": 5, "files": ["t.json"]}])
    writer = TraceWriter()
    writer.add_kernel("gemm", 0, 40)
    writer.add_kernel("ncclDevKernel_AllReduce", 40, 100, 13)
    writer.write(run.directory / "t.json")
    report = build_report(run)
    assert report.limit == "exposed communication (not overlapped with computation): 60% of the profiled time"
    assert next(iter(list_changes(report).values())) == pytest.approx(0.6)
    (run.directory / "t.json").write_text("{}")
    assert "the profile is not analyzed" in build_report(run).facts.notes[0], "a damaged trace does not stop the report"


@pytest.mark.parametrize(
    ("started", "change"),
    [
        ({"backend": "torchtitan"}, "set compile: true, or raise micro_batch_size"),
        ({"backend": "torchtitan", "compiled": True}, None),
        ({"backend": "megatron"}, "raise micro_batch_size"),
        ({"backend": "jax"}, None),
    ],
)
def test_compilation_is_suggested_where_the_engine_has_it(
    make_run: MakeRun, started: dict[str, Any], change: str | None
) -> None:
    profile = {"kind": "profile", "first_step": 5, "last_step": 5, "files": ["t.json"]}
    run = make_run([(1.0, 0.0)] * 30, started=started, after=[profile])
    writer = TraceWriter()
    writer.add("cpu_op", "aten::mm", 0, 40)
    writer.add("cpu_op", "aten::mm", 100, 140)
    writer.write(run.directory / "t.json")
    named = [each.change for each in build_report(run).changes if "larger operators" in each.change]
    assert [each.startswith(change or "-") for each in named] == ([True] if change else [])


def test_runs_that_failed_or_have_no_steps_or_metadata_are_reported(make_run: MakeRun) -> None:
    run = make_run([])
    run.update_metadata(outcome=RunOutcome(state="failed", exit_code=1, reason="rank 3 failed"))
    assert "failed: rank 3 failed" in format_markdown(build_report(run))
    assert build_report(run).limit == "the run has no training steps"
    run.events.write_text('{"time": 1, "kind": "step", "step": 1}\n{"time": 2, "kind": "st')
    (run.directory / "metadata.json").write_text("{")
    assert build_report(run).facts.summary.state == "damaged"
    format_html(build_report(run))


def test_losses_that_end_as_nan_and_numbers_edited_into_text_are_said(make_run: MakeRun) -> None:
    run = make_run([(1.0, 0.1)] * 20)
    lines = run.events.read_text().splitlines()
    nan = [re.sub(r'"loss": ?[\d.]+', '"loss": null', line) for line in lines[11:]]
    edited = re.sub(r'"tokens_per_s": ?[\d.]+', '"tokens_per_s": "fast"', lines[8])
    run.events.write_text("\n".join([*lines[:8], edited, *lines[9:11], *nan]) + "\n")
    text = format_markdown(build_report(run))
    assert "not finite from step 11 on, 4.9 before" in text
    assert "| tokens/s " in text and "1,000" in text


def test_the_page_is_self_contained_and_has_the_curves(make_run: MakeRun) -> None:
    text = format_html(build_report(make_run([(1.0, 0.1)] * 700)))
    assert text.count('<svg xmlns="http://www.w3.org/2000/svg" class="chart wide"') == 3, "loss, throughput and time"
    assert "<script" not in text
    assert not re.findall(r'(?:src|href)="(?!#)', text), "nothing is loaded from elsewhere"
    assert "NaN" not in text and "inf" not in re.findall(r' d="([^"]*)"', text)


MEASURE = """<script>
document.querySelector("main").style.width = "420px";
const tables = [...document.querySelectorAll(".wide")];
const cut = tables.filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText.slice(0, 40));
document.title = JSON.stringify({tables: tables.length, cut});
</script>"""
"""Names the tables of a page that are wider than a window of 420 pixels. Headless browsers make none below 500."""


def test_no_table_is_cut_in_a_narrow_window(make_run: MakeRun, tmp_path: Path) -> None:
    events = [
        {"kind": "training_ended", "core_wait_share": 0.6},
        {"kind": "profile", "first_step": 5, "last_step": 5, "files": ["t.json"]},
        {"kind": "eval", "step": 30, "loss": 4.0, "time_s": 9.0},
    ]
    run = make_run([(3.0, 0.5), *[(1.0, 0.3)] * 28, (2.5, 0.0)], after=events, mfu=0.4, tflops_per_device=412.5)
    writer = TraceWriter()
    writer.add_kernel("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_tn>", 0, 40)
    writer.add_kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 100, 13)
    writer.write(run.directory / "t.json")
    page = tmp_path / "report.html"
    page.write_text(format_html(build_report(run)).replace("</body>", f"{MEASURE}</body>"))
    found = re.search("<title>(.*?)</title>", browser.dom(page))
    assert found is not None
    measured = json.loads(html.unescape(found[1]))
    assert measured["tables"] >= 5
    assert measured["cut"] == []


def test_of_many_ranks_the_slowest_are_shown(make_run: MakeRun) -> None:
    run = make_run([(1.0, 0.0)] * 20)
    for rank in range(64):
        beat = {"host": f"node{rank // 8}", "step": 20, "compute_time_s": 1.3 if rank == 37 else 1 + rank / 1000}
        write_json(run.directory / "logs" / "attempt_0" / f"rank_{rank}.heartbeat.json", beat)
    report = build_report(run)
    (found,) = [each for each in list_tables(report) if each.title.startswith("Ranks")]
    assert found.title.endswith("the slowest 16 of 64")
    assert (len(found.rows), found.rows[0][:2]) == (16, ["37", "node4"])
    assert found.text == "the median is 1.031 s; rank 37 on node4 takes 1.26 times that"


def test_the_text_for_a_terminal_has_the_content_of_markdown_and_none_of_its_marks(make_run: MakeRun) -> None:
    report = build_report(make_run([(1.0, 0.5)] * 9, settings={"lr": 1e-3}))
    text, markdown = format_text(report), format_markdown(report)
    assert not re.search(r"^#|\*\*|^\|", text, re.MULTILINE)
    for word in ("What limits it: ", "tokens/s", "Changes", "Time of the run", "waiting for data"):
        assert word in text, word
    assert "## Time of the run" in markdown


def test_a_global_batch_that_was_computed_is_shown_and_not_none(make_run: MakeRun) -> None:
    run = make_run([(1.0, 0.0)] * 4, settings={"global_batch_size": None}, started={"global_batch_size": 24})
    assert collect_facts(run).settings["global_batch_size"] == 24
    asked = make_run([(1.0, 0.0)] * 4, settings={"global_batch_size": 8}, started={"global_batch_size": 8}, name="b")
    assert collect_facts(asked).settings["global_batch_size"] == 8


def test_the_range_of_speeds_is_that_of_interpolated_quantiles(make_run: MakeRun) -> None:
    run = make_run([(1.0, 0.0)] * 3 + [(1 / (1 + 0.01 * number), 0.0) for number in range(11)])
    facts = collect_facts(run)
    assert facts.tokens_per_s_low == pytest.approx(1005, rel=1e-6)
    assert facts.tokens_per_s_high == pytest.approx(1095, rel=1e-6)
