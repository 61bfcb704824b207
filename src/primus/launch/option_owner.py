"""Find the runtime that has an option, for options that were typed in another place."""

from __future__ import annotations

from collections.abc import Iterable

from primus import registry
from primus.config import flags
from primus.runtime import RUNTIMES

OTHER_NAMES = {
    "nproc_per_node": "nproc",
    "num_gpus": "nproc",
    "gpus": "nproc",
    "ngpus": "nproc",
    "num_nodes": "nnodes",
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
}
"""Options of `direct` as torchrun, accelerate and deepspeed name them (their --help)."""


def find_option_owner(name: str, first: Iterable[str] = ()) -> tuple[str, str] | None:
    """The runtime that has the option `name`, and its spelling there; the runtimes `first` are tried first."""
    for runtime in dict.fromkeys([*first, *registry.list_plug_ins("runtimes")]):
        spelling = _find_spelling(runtime, name)
        if spelling is not None:
            return runtime, spelling
    return None


def _find_spelling(runtime: str, name: str) -> str | None:
    options = registry.load_plug_in(RUNTIMES, runtime).Options
    spellings = {each: flag.names[0] for flag in flags.list_flags(options) for each in flag.names}
    other = OTHER_NAMES.get(name.lstrip("-").replace("-", "_"))
    return spellings.get(name) or (spellings.get(f"--{other}") if other else None)
