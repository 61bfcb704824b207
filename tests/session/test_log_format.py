"""What the user and the log of a rank get of a step, by `log_format`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from frameworks.native.test_trainer import report
from primus.runs.attempt import Attempt
from primus.runs.store import Run
from primus.session.reports.reporter import TrainingReporter


@pytest.mark.parametrize(("log_format", "begin"), [("auto", " ["), ("long", " ["), ("short", "step   1/300  loss 8.2")])
def test_the_log_of_a_rank_has_long_lines_whatever_the_user_sees(
    log_format: str, begin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = io.StringIO()
    attempt = Attempt(Run(tmp_path), 0, console=console)
    try:
        reporter = TrainingReporter(
            attempt, train_iters=300, log_interval=1, log_format=log_format, loggers=[], bar=None
        )
        reporter.after_report(report())
    finally:
        attempt.close()
    assert console.getvalue().startswith(begin)
    assert "iteration        1/     300 |" in capsys.readouterr().out
