"""Engines that cells need on this machine: missing ones are installed before the first cell starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from primus.comparison.matrix.cells import MatrixCell, list_engines
from primus.engines.choice import choose_engine
from primus.engines.environment import prepare_engine
from primus.errors import PrimusError
from primus.messages import Say


def describe_installs(cells: Sequence[MatrixCell], environ: Mapping[str, str]) -> list[str]:
    """What `install_engines` would install, for a dry run; touches nothing."""
    chosen = (choose_engine(list_engines(name), environ) for name in _list_frameworks(cells))
    return [choice.note for choice in chosen if choice is not None and choice.installation is None]


def install_engines(cells: Sequence[MatrixCell], environ: Mapping[str, str], say: Say) -> list[MatrixCell]:
    """Install what is missing; the cells of an engine that cannot be installed are refused with the reason."""
    refused: dict[str, PrimusError] = {}
    for name in _list_frameworks(cells):
        try:
            prepare_engine(list_engines(name), environ, say)
        except PrimusError as error:
            refused[name] = error
    return [_refuse(cell, refused[cell.place.framework]) if _is_refused(cell, refused) else cell for cell in cells]


def _list_frameworks(cells: Sequence[MatrixCell]) -> list[str]:
    return list(dict.fromkeys(cell.place.framework for cell in cells if _runs_here(cell)))


def _runs_here(cell: MatrixCell) -> bool:
    return cell.status == "runnable" and cell.is_local


def _is_refused(cell: MatrixCell, refused: Mapping[str, PrimusError]) -> bool:
    return _runs_here(cell) and cell.place.framework in refused


def _refuse(cell: MatrixCell, error: PrimusError) -> MatrixCell:
    return structs.replace(cell, status="refused", reason=error.problem, hint=error.hint)
