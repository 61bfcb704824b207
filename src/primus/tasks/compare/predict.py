"""Compare machines that you do not have access to by prediction, beside published results."""

from __future__ import annotations

from msgspec import Struct

from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `compare predict`."""

    matrix: str
    """Matrix of machines: a file, or llama3.1_70B, llama3.1_405B, mixtral_8x7B or deepseek_v3."""


def run(options: Options, context: TaskContext) -> None:
    """Print the comparison.

    Raises:
        UsageError: The matrix, its model or a machine does not exist, or is wrong.
    """
    # Not for the commands that only list this task.
    from primus.comparison.report.predicted_cells import format_purchase, predict_matrix, read_purchase_matrix

    found = predict_matrix(read_purchase_matrix(options.matrix))
    context.result(found, format_purchase(found))
