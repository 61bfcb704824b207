"""Logs of public threads, by kind of failure: the verdict, where it failed first, and what the answer tells."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from primus.cli.main import main
from primus.diagnosis.diagnose import diagnose_logs


class ThreadCase(Struct, frozen=True, forbid_unknown_fields=True):
    """A log of a public thread, and its truth."""

    source: str
    text: str
    cause: tuple[str, ...] = ()
    """Signatures that the thread supports; none where the text holds no cause."""
    first: str = ""
    """Rank, host, pod or task that failed first."""
    says: tuple[str, ...] = ()
    """What the answer tells besides: an address, a rank, an exit code, the next step."""
    healthy: bool = False


def read_cases(name: str) -> list[ThreadCase]:
    import yaml

    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return msgspec.convert(yaml.load(text, yaml.CSafeLoader), list[ThreadCase])


CASES = read_cases("threads.yaml")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.source)
def test_the_verdict_tells_cause_place_and_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: ThreadCase
) -> None:
    path = tmp_path / "a.log"
    path.write_text(case.text, encoding="utf-8")
    main(["direct", "--", "diagnose", str(path)])
    shown = capsys.readouterr().out
    lead = diagnose_logs([path]).lead
    if case.healthy:
        assert "no sign of a failure was found" in shown
        return
    assert (lead.signature if lead else None) in (case.cause or (None,))
    rows = dict(line.split(":", 1) for line in shown.splitlines() if ":" in line and line[0].isalpha())
    assert case.first in rows.get("first", "")
    answer = "\n".join(line for line in shown.splitlines() if line.startswith(("cause", "first", "fix")))
    assert [word for word in case.says if word not in answer] == []
    assert "fix:" in shown or not lead
