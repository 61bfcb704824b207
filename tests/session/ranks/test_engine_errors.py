"""Errors of engines that a user can act on say what to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from primus.errors import PrimusError
from primus.session.ranks.engine_errors import explain_torch_errors, find_reason

torch = pytest.importorskip("torch")


def test_errors_of_torch_that_a_user_can_act_on_are_explained() -> None:
    def failing(error: BaseException) -> Iterator[None]:
        with explain_torch_errors():
            raise error
        yield

    with pytest.raises(PrimusError, match="out of memory: DefaultCPUAllocator"):
        next(failing(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")))
    with pytest.raises(PrimusError, match="out of memory"):
        next(failing(MemoryError()))
    with pytest.raises(RuntimeError, match="something else"):
        next(failing(RuntimeError("something else")))


def test_a_plain_assertion_is_named_by_its_place() -> None:
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    reason = find_reason(caught.value)
    assert reason.startswith("AssertionError at ") and "test_engine_errors.py" in reason
