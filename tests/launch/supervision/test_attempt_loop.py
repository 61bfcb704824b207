"""The loop of attempts tells the other nodes what ends it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from primus.errors import PrimusError
from primus.launch.nodes.control_channel import ControlMessage
from primus.launch.supervision import attempt_loop


@pytest.mark.parametrize(("rank", "method"), [(0, "_lead_attempts"), (3, "_follow_decisions")])
def test_a_launcher_that_fails_itself_tells_the_other_nodes_why(
    monkeypatch: pytest.MonkeyPatch, rank: int, method: str
) -> None:
    sent: list[ControlMessage] = []

    def fail(*given: object) -> NoReturn:
        raise PrimusError("no space left in /output")

    monkeypatch.setattr(attempt_loop, method, fail)
    session: Any = SimpleNamespace(channel=SimpleNamespace(send_message=sent.append))
    launch: Any = SimpleNamespace(plan=SimpleNamespace(layout=SimpleNamespace(node_rank=rank)))
    with pytest.raises(PrimusError, match="no space left"):
        attempt_loop.supervise_attempts(session, launch)
    assert [(message.kind, message.text) for message in sent] == [("lost", "no space left in /output")]
