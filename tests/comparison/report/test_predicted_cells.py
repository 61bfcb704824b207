"""Machines that nobody here has, compared by prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus import registry
from primus.comparison.report.predicted_cells import format_purchase, predict_matrix, read_purchase_matrix
from primus.errors import UsageError

SHIPPED = sorted(path.stem for path in (registry.PACKAGE / "presets/purchases").glob("*.yaml"))


def write_matrix(folder: Path, machines: str) -> str:
    file = folder / "matrix.yaml"
    file.write_text(f"model: llama3.1_8B\nseq_length: 8192\nbatch_tokens: 1048576\nmachines:\n{machines}")
    return str(file)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_matrix_can_be_read(name: str) -> None:
    matrix = read_purchase_matrix(name)
    assert set(matrix.machines) == {"mi355x:8", "b200:8"}


def test_cells_stand_beside_published_ones_and_follow_from_prices_and_power(tmp_path: Path) -> None:
    machines = "  mi355x:8: {formats: [bf16, fp8], price_per_gpu_hour: 2.5, price_source: USD, a test}\n"
    machines = machines.replace("USD, a test", '"USD, a test"') + "  b200:8: {formats: [fp8]}\n"
    found = predict_matrix(read_purchase_matrix(write_matrix(tmp_path, machines)))
    predicted = [cell for cell in found.cells if cell.kind == "predicted"]
    assert [(cell.machine, cell.format) for cell in predicted] == [
        ("mi355x:8", "bf16"), ("mi355x:8", "fp8"), ("b200:8", "fp8")
    ]  # fmt: skip
    bf16, fp8, other = predicted
    assert bf16.tokens_per_s_per_gpu and fp8.tokens_per_s_per_gpu and other.tokens_per_s_per_gpu
    assert bf16.tokens_per_s_per_gpu < fp8.tokens_per_s_per_gpu
    assert bf16.tokens_per_s_per_node == pytest.approx(8 * bf16.tokens_per_s_per_gpu)
    assert bf16.tokens_per_price == pytest.approx(bf16.tokens_per_s_per_gpu * 3600 / 2.5)
    assert bf16.tokens_per_kwh == pytest.approx(bf16.tokens_per_s_per_gpu * 3.6e6 / 1400)
    assert other.tokens_per_price is None
    published = [cell for cell in found.cells if cell.kind == "published"]
    assert {cell.machine for cell in published} == {"mi355x", "b200"}
    text = format_purchase(found)
    assert "different computations" in text
    assert text.count("published") >= len(published)


def test_formats_that_a_device_lacks_and_models_that_do_not_fit_have_no_figure(tmp_path: Path) -> None:
    machines = "  mi300x:8: {formats: [mxfp8]}\n  mi355x:8: {formats: [nvfp4]}\n  a100:1: {formats: [bf16]}\n"
    cells = predict_matrix(read_purchase_matrix(write_matrix(tmp_path, machines))).cells
    problems = [cell.problem for cell in cells if cell.kind == "predicted"]
    assert "MI300X has no products in mxfp8" in problems[0]
    assert "NVIDIA's format" in problems[1]
    assert "GiB" in problems[2]


def test_a_price_without_source_and_an_unknown_matrix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a price without source"):
        read_purchase_matrix(write_matrix(tmp_path, "  mi355x:8: {price_per_gpu_hour: 2}\n"))
    with pytest.raises(UsageError, match="no such file") as error:
        read_purchase_matrix("nothing")
    assert "deepseek_v3" in error.value.hint
