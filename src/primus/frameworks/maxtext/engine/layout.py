"""MaxText's configuration and device mesh, and the part of the batch that each process reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, sharding
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

from primus.config.schema import Trainer
from primus.config.source import ConfigValue
from primus.errors import UsageError
from primus.frameworks.maxtext.settings import build_settings
from primus.session.ranks.engine_errors import find_reason


class MaxTextLayout(NamedTuple):
    """The devices of all processes, and the part of this process."""

    mesh: Mesh
    batch_sharding: NamedSharding
    """Where a batch [B, S] lies."""
    data_rank: int
    """Which sequences this process gets."""
    data_size: int
    """Processes, or groups of processes that get the same sequences."""


def read_config(settings: Mapping[str, ConfigValue]) -> Any:
    """The configuration of MaxText with `settings` over its base.yml.

    Raises:
        UsageError: MaxText refuses it; gives its reason.
    """
    with _explain_refusal():
        return pyconfig.initialize(None, base_config=os.path.join(MAXTEXT_CONFIGS_DIR, "base.yml"), **settings)


@contextmanager
def _explain_refusal() -> Iterator[None]:
    """Turn an error of MaxText about its configuration into one that gives the reason.

    Raises:
        UsageError: MaxText refuses the configuration.
    """
    try:
        yield
    except (SystemExit, ValueError, AssertionError, NotImplementedError) as error:
        # MaxText ends the process after it has printed the error of its configuration.
        cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
        raise UsageError(
            f"MaxText refuses the configuration: {_format_cause(cause)}",
            "docs/engine-maxtext.md lists its settings; the whole message is in the log of the rank",
        ) from error


def plan_layout(trainer: Trainer, folder: Path, on_cpu: bool) -> MaxTextLayout:
    """The mesh that MaxText makes of all devices, and the rows of a batch on those of each process.

    Raises:
        UsageError: MaxText refuses the configuration, or gives a process a part of what another one gets.
    """
    config = read_config(build_settings(trainer, folder, on_cpu, batch_per_device=1, num_micro_batches=1))
    mesh = _make_mesh(config)
    batch_sharding = sharding.get_input_data_sharding(config, mesh)
    rows: dict[int, list[tuple[int, int]]] = {}
    for device, index in batch_sharding.devices_indices_map((mesh.size, 1)).items():
        start, end, _ = index[0].indices(mesh.size)
        rows.setdefault(device.process_index, []).append((start, end))
    bounds = {process: (min(each)[0], max(end for _, end in each)) for process, each in rows.items()}
    groups = sorted(set(bounds.values()))
    if any(end > after for (_, end), (after, _) in pairwise(groups)):
        raise UsageError(
            "with these parallel sizes, processes would read overlapping parts of a batch",
            "use sizes that divide the number of processes",
        )
    return MaxTextLayout(mesh, batch_sharding, groups.index(bounds[jax.process_index()]), len(groups))


def _make_mesh(config: Any) -> Mesh:
    """The devices along the axes of MaxText.

    Raises:
        UsageError: The sizes along the axes do not multiply to the number of devices.
    """
    try:
        return maxtext_utils.get_mesh_from_config(config)
    except (ValueError, AssertionError) as error:
        names = [name for name in config.get_keys() if name.startswith("ici_") and name != "ici_parallelism"]
        sizes = {name: getattr(config, name) for name in sorted(names)}
        written = ", ".join(f"{name}: {size}" for name, size in sizes.items() if size != 1)
        raise UsageError(
            f"{written}: MaxText has no mesh of these sizes: they must multiply to the number of devices, "
            f"{jax.device_count()}",
            "start as many devices, or change the sizes: one of them may be -1, the devices that the others leave",
        ) from error


def build_config(trainer: Trainer, folder: Path, on_cpu: bool, layout: MaxTextLayout, global_batch_size: int) -> Any:
    """The configuration of the run.

    Raises:
        UsageError: MaxText refuses it.
    """
    batch = trainer.training.micro_batch_size * layout.data_size
    per_device = batch / layout.mesh.size
    settings = build_settings(
        trainer,
        folder,
        on_cpu,
        batch_per_device=int(per_device) if per_device.is_integer() else per_device,
        num_micro_batches=global_batch_size // batch,
    )
    return read_config(settings)


def _format_cause(error: BaseException) -> str:
    """The first problem in an error of pydantic, or the first line of another one."""
    problems = getattr(error, "errors", None)
    if not callable(problems):
        return find_reason(error)
    first = problems()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
