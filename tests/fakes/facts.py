"""A machine with given facts, for commands that run in the process of a test."""

from __future__ import annotations

import pytest

from primus.machine.facts import MachineFacts
from primus.machine.probe import MachineReader


def assume_facts(monkeypatch: pytest.MonkeyPatch, facts: MachineFacts) -> None:
    """Let this machine have `facts`."""
    monkeypatch.setattr(MachineReader, "gpu_facts", facts)
    monkeypatch.setattr(MachineReader, "read_facts", lambda self, master=None: facts)
