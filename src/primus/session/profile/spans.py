"""Named spans of the host, such as the wait for a batch; a profile that is being recorded shows them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

SpanOpener = Callable[[str], AbstractContextManager[object]]
"""Function that opens a span of a name."""
DATA_SPAN = "data"
"""Name of the span in which a process waits for its batch."""

_OPENER: ContextVar[SpanOpener] = ContextVar("span_opener", default=nullcontext)


def open_span(name: str) -> AbstractContextManager[object]:
    """A context that the profile shows under `name`; it does nothing while none is recorded."""
    return _OPENER.get()(name)


def set_span_opener(opener: SpanOpener | None) -> None:
    """Record spans by `opener` from now on; None ends the recording."""
    _OPENER.set(opener or nullcontext)
