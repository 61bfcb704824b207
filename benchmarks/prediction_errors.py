"""Predicted against published step times: the table of errors of docs/prediction.md.

    python benchmarks/prediction_errors.py            # the table, as Markdown
    python benchmarks/prediction_errors.py --refit    # finds the constants again, from the rows marked `fit` alone

The rows are src/primus/prediction/published_steps.yaml; held rows are never fitted to. Later rows are those of
src/primus/comparison/report/published_results.yaml with another layout or device than these. A pair of rows of one
model with the same device, number of devices and length is in the right order if the faster one is predicted faster.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from msgspec import structs

from primus.comparison.report.published_results import PublishedResult, read_published_results
from primus.config.schema import ModelSpec
from primus.prediction.device_rates import DeviceRates
from primus.prediction.published_steps import PublishedStep, read_published_steps
from primus.prediction.step_layout import Precision, StepLayout
from primus.prediction.step_time import FITTED, FittedConstants, predict_step

BOUNDS = {
    "product_share": (0.7, 1.0),
    "low_product_share": (0.6, 1.0),
    "attention_share": (0.4, 0.8),
    "memory_share": (0.5, 0.9),
    "half_rows": (0, 1000),
    "tensor_exposed": (0.2, 1),
    "expert_exposed": (0.2, 1),
    "weights_exposed": (0, 0.4),
}
"""What each constant may be."""
PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
Prepared = tuple[PublishedStep, ModelSpec, DeviceRates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refit", action="store_true", help="find the constants again")
    options = parser.parse_args()
    rows = prepare_rows()
    if options.refit:
        found = refit([row for row in rows if row[0].use == "fit"])
        print("\n".join(f"{name} = {value:.3g}" for name, value in structs.asdict(found).items()))
        return
    print(format_table(rows))


def prepare_rows() -> list[Prepared]:
    """All rows with their models and rates."""
    steps = read_published_steps()
    known = {(row.model, row.device, row.layout) for row in steps}
    later = [row for row in map(convert_result, read_published_results()) if row]
    new = [row for row in later if (row.model, row.device, row.layout) not in known]
    return [(row, row.spec, row.read_rates()) for row in (*steps, *new)]


def convert_result(result: PublishedResult) -> PublishedStep | None:
    """A published result with a whole layout as a held row; None if the source does not state one."""
    sizes = result.layout
    if sizes is None or not (result.devices and result.global_batch_size and result.seq_length):
        return None
    layout = StepLayout(
        devices=result.devices,
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        virtual=sizes.virtual,
        context=sizes.context,
        expert=sizes.expert,
        micro_batch=result.micro_batch_size or 1,
        global_batch=result.global_batch_size,
        seq_length=result.seq_length,
        precision=PRECISIONS[result.precision],
        sharding="full" if sizes.is_sharded else "optimizer",
        tensor_overlap=sizes.tensor > 1,
    )
    return PublishedStep(
        use="held",
        model=result.model,
        device=result.device.lower(),
        tokens_per_s=result.tokens_per_s_per_device,
        source=f"{result.source}, {result.version}",
        layout=layout,
    )


def find_error(row: Prepared, fitted: FittedConstants = FITTED) -> float:
    """Predicted over published tokens per second, minus 1."""
    published, spec, rates = row
    return predict_step(spec, published.layout, rates, fitted).tokens_per_s_per_device / published.tokens_per_s - 1


def refit(rows: Sequence[Prepared]) -> FittedConstants:
    """Constants with the least sum of |log ratio|, each error counted up to 40 % so that one odd row does not decide.

    Coordinate descent on a grid that narrows; deterministic.
    """

    def loss(fitted: FittedConstants) -> float:
        errors = [abs(math.log1p(find_error(row, fitted))) for row in rows]
        return sum(min(error, 0.35) + error**2 for error in errors)

    best, width = FITTED, 1.0
    for _ in range(8):
        for name, (low, high) in BOUNDS.items():
            here = getattr(best, name)
            tried = [here + width * (high - low) * step / 6 for step in range(-3, 4)]
            best = min((structs.replace(best, **{name: min(high, max(low, value))}) for value in tried), key=loss)
        width *= 0.7
    return best


def format_table(rows: Sequence[Prepared]) -> str:
    """The table of errors with its summary."""
    errors = [find_error(row) for row in rows]
    lines = []
    for use in ("fit", "held"):
        chosen = [(row[0], error) for row, error in zip(rows, errors, strict=True) if row[0].use == use]
        sizes = sorted(abs(error) for _, error in chosen)
        within = sum(size <= 0.2 for size in sizes)
        summary = (
            f"median error {statistics.median(sizes):.1%}, mean {statistics.mean(sizes):.1%}, worst {sizes[-1]:.0%};"
            f" within 20 %: {within} of {len(sizes)}."
        )
        lines += [
            f"{'Fitted' if use == 'fit' else 'Held'} rows: {len(sizes)}; {summary}",
            "",
            "| model | device x n | precision | length | layout | published tok/s | predicted | error | source |",
            "|---|---|---|---:|---|---:|---:|---:|---|",
            *(_format_row(row, error) for row, error in chosen),
            "",
        ]
    right, total = count_ordered_pairs(rows, errors)
    lines.append(f"Order of two layouts of one model on the same devices: right in {right} of {total} pairs.")
    return "\n".join(lines)


def _format_row(row: PublishedStep, error: float) -> str:
    layout = row.layout
    settings = layout.format_settings().removesuffix(f", {layout.precision}")
    device = row.rates or row.device
    return (
        f"| {row.model} | {device} x {layout.devices} | {layout.precision} | {layout.seq_length} | {settings} |"
        f" {row.tokens_per_s:,.5g} | {row.tokens_per_s * (1 + error):,.5g} | {error:+.0%} | {row.source} |"
    )


def count_ordered_pairs(rows: Sequence[Prepared], errors: Sequence[float]) -> tuple[int, int]:
    """Pairs whose order is predicted rightly, and all pairs whose published speeds differ by more than 2 %."""
    right = total = 0
    for (one, error), (other, other_error) in combinations(zip(rows, errors, strict=True), 2):
        first, second = one[0], other[0]
        same = (first.model, first.device, first.rates, first.layout.devices, first.layout.seq_length)
        if same != (second.model, second.device, second.rates, second.layout.devices, second.layout.seq_length):
            continue
        ratio = first.tokens_per_s / second.tokens_per_s
        if abs(ratio - 1) > 0.02:
            total += 1
            right += (ratio > 1) == (ratio * (1 + error) / (1 + other_error) > 1)
    return right, total


if __name__ == "__main__":
    main()
