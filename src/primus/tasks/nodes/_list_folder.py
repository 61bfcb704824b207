"""Which list of unfit nodes a task means."""

from __future__ import annotations

from collections.abc import Mapping

from primus.runs.files import UNFIT_NODES_VARIABLE


def choose_list(environ: Mapping[str, str], given: str | None) -> Mapping[str, str]:
    """Variables with the folder of `--unfit-nodes`, if that is given."""
    return environ if given is None else {**environ, UNFIT_NODES_VARIABLE: given}
