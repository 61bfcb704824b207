"""Keep the experiment's settings of an optimizer while the state of a checkpoint is loaded into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

KEPT = ("betas", "eps", "weight_decay", "fused", "foreach", "initial_lr")
"""Of the experiment: torch's `load_state_dict` replaces them by those of the checkpoint, which native does not save."""


@contextmanager
def keep_settings(list_groups: Callable[[], Sequence[MutableMapping[str, object]]]) -> Iterator[None]:
    """Restore the settings of all parameter groups at the end of a `with`; the groups keep their order."""
    before = [{name: group[name] for name in KEPT if name in group} for group in list_groups()]
    yield
    for group, settings in zip(list_groups(), before, strict=True):
        group.update(settings)
