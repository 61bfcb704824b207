"""`compare report` as a command: from folders, archives and files of others to tables and a page."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.browser import NAMES, dom
from tests.comparison.fair_results import change_settings, make_result

from primus.cli.main import main
from primus.comparison.folder.archive import LoadedResults
from primus.comparison.folder.comparison_folder import ComparisonFolder
from primus.comparison.folder.purge import find_purged_paths, remove_paths
from primus.comparison.report.cell_results import group_cells
from primus.comparison.report.comparison_report import ReportOptions, build_comparison_report
from primus.comparison.report.files import write_final_report
from primus.comparison.report.tables import list_answers
from primus.comparison.results.result import save_result

TPRIMAT = {  # the example of its README
    "platform": "amd",
    "gpu_info": {"device_name": "AMD Instinct MI300X", "device_count": 8, "total_memory_gb": 192.0},
    "training_config": {
        "max_steps": 500, "global_batch_size": 64, "micro_batch_size": 1, "sequence_length": 2048, "num_gpus": 8,
    },
    "performance_metrics": {
        "avg_step_time_seconds": 0.45, "tokens_per_second": 580000, "tokens_per_second_per_gpu": 72500,
    },
    "step_times": [],
    "loss_values": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three cells of three runs: two that are fair to compare, and one with another batch size."""
    found = tmp_path_factory.mktemp("results")
    for framework, step_s in (("native", 0.1), ("jax", 0.112), ("megatron", 0.1)):
        for seed in range(3):
            result = make_result(framework, step_s=step_s, seed=seed)
            if framework == "megatron":
                result = change_settings(result, global_batch_size=16)
            save_result(result, found / f"{result.cell.name}.json")
    (found / "package.json").write_text('{"name": "other"}')
    return found


def report(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["direct", "--", "compare", "report", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_only_fair_pairs_have_a_ratio_and_foreign_files_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = report(capsys, folder, "--html", "--md", "--csv", "--output", tmp_path)
    assert code == 0
    pairs = {line.split("  ")[0] + line[20:]: line for line in out.splitlines() if " fair " in line or "unfair" in line}
    fair = [line for line in pairs.values() if "jax" in line and "native" in line]
    assert len(fair) == 1 and "98%" in fair[0] and "no ratio" not in fair[0]
    unfair = [line for line in pairs.values() if "megatron" in line]
    assert len(unfair) == 2
    assert all("no ratio: setting global_batch_size: a step on more samples" in line for line in unfair)
    assert "package.json: not a result" in out
    answers = [line for line in out.splitlines() if " times as fast as " in line or "show no difference" in line]
    assert len(answers) == 1, "one pair is fair"
    assert answers[0] in (tmp_path / "report.md").read_text() and answers[0] in (tmp_path / "report.html").read_text()
    rows = list(csv.DictReader((tmp_path / "cells.csv").read_text().splitlines()))
    assert [row["framework"] for row in rows] == ["jax", "megatron", "native"]
    assert float(rows[0]["step_s_low"]) < float(rows[0]["step_s"]) < float(rows[0]["step_s_high"])
    markdown = (tmp_path / "report.md").read_text()
    assert "## jax and native: fair" in markdown
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    for title in ("Throughput of a device", "Pairs: A by B", "warm-up: ", "Loss over tokens", "Loss over training time",
                  "Peak memory", "dense peak", "Speed and energy"):  # fmt: skip
        assert title in page, title


def test_seeds_of_a_cell_show_how_much_losses_differ_by_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for framework, gap in (("native", 0.0), ("jax", 0.02)):
        for seed in range(3):
            result = change_settings(make_result(framework, seed=seed), seed=seed)
            losses = [0 if loss is None else loss + gap + 0.1 * seed for loss in result.steps.loss]
            result = structs.replace(result, steps=structs.replace(result.steps, loss=losses))
            save_result(result, tmp_path / f"{result.cell.name}.json")
    assert report(capsys, tmp_path, "--html", "--output", tmp_path)[0] == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["pairs"][0]["verdict"]["status"] == "fair"
    reasons = {check["rule"]: check["reason"] for check in found["pairs"][0]["verdict"]["checks"]}
    assert reasons["loss curves"] == "they differ by 0.02 on average; trainings with 3 seeds differ by 0.13"
    assert "Losses with other seeds" in (tmp_path / "report.html").read_text()


def test_more_curves_than_colors_are_drawn_by_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("identical", "tuned"):
        for framework in ("native", "jax", "megatron", "torchtitan", "huggingface"):
            result = make_result(framework)
            cell = structs.replace(result.cell, settings_class=name)
            save_result(structs.replace(result, cell=cell), tmp_path / f"{cell.name}.json")
    assert report(capsys, tmp_path, "--html", "--output", tmp_path)[0] == 0
    page = (tmp_path / "report.html").read_text()
    for name in ("identical", "tuned"):
        assert page.count(f"Time of each step of the first run, tiny {name}") == 1
        assert page.count(f"Loss over tokens, tiny {name}") == 2, "for wide and for narrow screens"


def test_allowed_unfair_ratios_carry_their_reason_in_the_picture(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = report(capsys, folder, "--allow-unfair", "--html", "--output", tmp_path)
    assert out.count("NOT FAIR: setting global_batch_size") == 2
    picture = (tmp_path / "report.html").read_text().split("Pairs: A by B")[1].split("</svg>")[0]
    assert picture.count("NOT FAIR: setting global_batch_size") == 2


def test_a_speed_above_the_peak_is_refused_even_if_unfair_pairs_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train_amd_prim_llama.json").write_text(json.dumps(TPRIMAT))
    slow = {**TPRIMAT, "performance_metrics": {"tokens_per_second_per_gpu": 9000.0}}
    (tmp_path / "train_amd_mega_llama.json").write_text(json.dumps(slow))
    code, out, _ = report(capsys, tmp_path, "--allow-unfair", "--csv", "--output", tmp_path / "out")
    assert code == 0
    assert "72,500 tokens/s per device is 2.5" in out and "impossible" in out
    assert "refused" in out and "NOT FAIR" not in out
    rows = {row["framework"]: row for row in csv.DictReader((tmp_path / "out/cells.csv").read_text().splitlines())}
    assert 0.3 < float(rows["mega"]["mfu_causal"]) < 0.35


def test_archives_of_other_machines_are_merged_with_published_results_and_prices(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [make_result("native", step_s=0.05, seed=seed) for seed in range(3)]
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        for result in results:
            device = structs.replace(result.gpu_info, device_name="Other CPU")
            save_result(structs.replace(result, gpu_info=device), tmp_path / "one.json")
            archive.write(tmp_path / "one.json", f"other/results/{result.cell.name}.json")
        archive.writestr("other/runs/x/metadata.json", "{}")
    published = (
        "- {device: H100, framework: titan, model: tiny, tokens_per_s_per_device: 5000, precision: bf16, source: S}"
    )
    (tmp_path / "table.yaml").write_text(published)
    price = "- {device: other cpu, per_device_hour: 3.6, currency: EUR, source: a list, date: 2026-01-31}"
    (tmp_path / "prices.yaml").write_text(price)
    words = ("--published", tmp_path / "table.yaml", "--prices", tmp_path / "prices.yaml", "--target-loss", "5.8")
    _, out, _ = report(capsys, folder, tmp_path / "other.zip", *words, "--html", "--output", tmp_path)
    for text in ("native on 2 x Other CPU", "H100 titan bf16", "EUR", "s to loss 5.8"):
        assert text in out, text
    page = (tmp_path / "report.html").read_text()
    assert "a list" in page and "hollow" in page


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("prices.yaml", "- {device: X, per_device_hour: 1}", "not a list of prices"),
        (
            "published.yaml",
            "- {device: X, framework: y, model: z, tokens_per_s_per_device: 1, precision: '', source: S}",
            "no source or precision",
        ),
    ],
)  # fmt: skip
def test_a_table_without_sources_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, problem: str
) -> None:
    (tmp_path / name).write_text(text)
    code, _, errors = report(capsys, folder, f"--{name.removesuffix('.yaml')}", tmp_path / name)
    assert (code, problem in errors) == (2, True)


def test_places_without_results_and_damaged_archives_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys, tmp_path / "absent")[0] == 2
    (tmp_path / "a.json").write_text('{"schema": "primus-comparison-result", "schema_version": 99}')
    code, _, errors = report(capsys, tmp_path)
    assert (code, "results of version 99" in errors) == (2, True)
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04 cut off")
    code, _, errors = report(capsys, tmp_path / "cut.zip")
    assert (code, "cut.zip: cannot be read" in errors) == (1, True)
    (tmp_path / "results.tar.gz").write_bytes(gzip.compress(b"a tar file"))
    code, _, errors = report(capsys, tmp_path / "results.tar.gz")
    assert (code, "neither a result nor an archive of compare wrap\n  unpack it" in errors) == (2, True)


def test_a_result_that_fills_the_memory_is_skipped_and_an_archive_may_have_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primus.comparison.folder.archive.MOST_BYTES", 1 << 20)
    save_result(make_result(), tmp_path / "one.json")
    with zipfile.ZipFile(tmp_path / "archive", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "one.json", "other/results/one.json")
        archive.writestr("other/results/two.json", b" " * (2 << 20))
    code, out, _ = report(capsys, tmp_path / "archive")
    assert (code, "two.json: larger than 1 MiB" in out, "cpu native tiny" in out) == (0, True, True)


def test_pictures_without_a_browser_are_refused_with_what_else_there_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, errors = report(capsys, folder, "--png", "--output", tmp_path / "png")
    assert (code, "use --html" in errors, (tmp_path / "png").exists()) == (3, True, False)


def test_the_page_has_all_pictures_in_a_real_browser(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(capsys, folder, "--html", "--output", tmp_path)
    shown = dom(tmp_path / "report.html")
    assert shown.count("<svg") == (tmp_path / "report.html").read_text().count("<svg") >= 8


def read_png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG, from its first chunk."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


@pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="no browser is installed")
def test_all_pictures_are_in_one_file_as_tprimat_writes_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    shutil.copytree(folder, tmp_path / "output/tprimat/results")
    comparison = ComparisonFolder(tmp_path / "output/tprimat")
    comparison.update_record("tprimat", "config.env", "", [])
    written = [path.relative_to(tmp_path / "output").as_posix() for path in write_final_report(comparison)]
    assert {"tprimat/report/report.html", "tprimat/report/compare.png", "compare.png"} <= set(written)
    pictures = [path for path in (tmp_path / "output/tprimat/report").glob("*.png") if path.stem != "compare"]
    heights = [read_png_size(path)[1] for path in pictures]
    assert len(pictures) > 3 and read_png_size(tmp_path / "output/compare.png")[1] == sum(heights)
    purged = find_purged_paths(comparison, has_data=False)
    assert str(tmp_path / "output/compare.png") in purged.paths
    remove_paths(purged)
    assert not os.path.lexists(tmp_path / "output/compare.png")


def test_a_run_without_a_counterpart_is_judged_and_one_of_another_seed_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = make_result().load
    for seed in range(3):
        result = make_result("jax", seed=seed)
        others = 0.4 if seed == 2 else 0.0
        result = structs.replace(result, load=structs.replace(load, other_cpu_share=others))
        save_result(result, tmp_path / f"{result.cell.name}.json")
    save_result(make_result("native"), tmp_path / "native.json")
    _, out, _ = report(capsys, tmp_path)
    assert "no ratio: other load: other processes took 40% and 1% of the machine" in out
    assert "run 3: other processes took 40%" in out and "--repeat-disturbed" in out
    # The disturbed run has another seed than all of the other side.
    disturbed = change_settings(structs.replace(result), seed=5)
    save_result(disturbed, tmp_path / f"{result.cell.name}.json")
    _, out, _ = report(capsys, tmp_path)
    assert "jax" in out and "no ratio" not in out and "from steps of" not in out


def test_the_answer_names_the_faster_cell_first_and_says_why_there_is_none() -> None:
    def answer(times: tuple[float, float], **changes: Any) -> list[str]:
        slow, fast = ("a", times[0]), ("b", times[1])
        results = [make_result(name, step_s=time, seed=seed) for name, time in (slow, fast) for seed in range(3)]
        results = [structs.replace(each, **changes) if each.cell.framework == "b" else each for each in results]
        loaded = LoadedResults(results=results, files=[f"{n}.json" for n in range(len(results))], skipped=[])
        return list_answers(build_comparison_report(group_cells(loaded), [], ReportOptions()))

    faster = answer((0.2, 0.1))
    assert len(faster) == 1 and faster[0].startswith("b is ") and " times as fast as a (98%: " in faster[0]
    assert 1.9 < float(faster[0].split()[2]) < 2.1
    low, high = (float(each) for each in re.findall(r"98%: ([\d.]+) to ([\d.]+)", faster[0])[0])
    assert low < float(faster[0].split()[2]) < high
    assert answer((0.1, 0.2))[0].startswith("a is ")
    assert answer((0.1, 0.1))[0].startswith("a and b show no difference in speed")
    refused = answer((0.2, 0.1), precision="bfloat16")
    assert refused[0].startswith("No pair is fair, so that no speed is compared: a and b: precision used")
