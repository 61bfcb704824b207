"""Reports of what a step shows besides its loss: how tokens spread over experts, and the loss of further tokens."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from primus.callback import Callback, StepReport
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.moe import Router
from primus.frameworks.native.engine.step import StepResult
from primus.session.session import Session

ROUTING, PREDICTION = "routing", "mtp_loss"
"""Events, and names of scalars."""


class StepMonitor(Callback):
    """Appends an event of the routing at each `log_interval`, and prints a line where experts get no token or all.

    Args:
        session: The run.
        model: That is trained.
        results: The engine appends each step's.
    """

    def __init__(self, session: Session, model: Transformer, results: deque[StepResult]) -> None:
        self._session, self._results, self._axis = session, results, model.layout.pipeline
        names = {name.partition(".feed_forward")[0]: each for name, each in model.named_modules() if is_router(each)}
        # In the place of its layer in the whole model, those of other pipeline stages are zeros.
        self._places = [_number(name, model) for name in names]
        spec = model.spec
        size = spec.num_layers + spec.mtp_num_layers, (spec.num_experts or 0) + 1
        self._loads = torch.zeros(size, dtype=torch.int64, device=next(model.parameters()).device)
        self._topk, self._first, self._said = spec.moe_router_topk, 1, dict[int, str]()

    def after_rewind(self, step: int) -> None:
        self._results.clear()
        self._loads.zero_()
        self._first = step + 1

    def after_report(self, report: StepReport) -> None:
        result = self._results.popleft()
        if result.prediction_loss is not None:
            loss = result.prediction_loss.item()
            self._session.attempt.event(PREDICTION, step=report.step, loss=loss)
            self._session.reporter.log_scalars(report.step, {PREDICTION: loss})
        if self._loads.shape[1] == 1:
            return
        if result.routing is not None:
            self._loads[self._places] += result.routing
        if report.skipped and not report.spike:
            self._name_failures(report.step)
        if report.step % self._session.trainer.logging.log_interval == 0:
            self._report_loads(report.step)

    def _name_failures(self, step: int) -> None:
        """Name the first layer whose router has no finite logits, and the ranks where."""
        processes = self._session.processes
        own = [layer for layer, count in enumerate(self._loads[:, -1].tolist()) if count]
        found = [own]
        if processes.world > 1:
            found = [[] for _ in range(processes.world)]
            dist.all_gather_object(found, own)
        self._loads[:, -1] = 0
        layers = sorted({layer for each in found for layer in each})
        if layers:
            ranks = [rank for rank, each in enumerate(found) if layers[0] in each]
            self._session.reporter.print_line(
                f"step {step}: the router of layer {layers[0]} has logits that are NaN or infinite, on"
                f" {_list('rank', ranks)} (first of {len(layers)} layers); the step is skipped"
            )
            self._session.attempt.event("router_not_finite", step=step, layers=layers, ranks=ranks)

    def _report_loads(self, step: int) -> None:
        if self._axis.size > 1:
            dist.all_reduce(self._loads, group=self._axis.group)
        loads = self._loads[:, :-1]
        routed = {layer: row for layer, row in enumerate(loads.tolist()) if sum(row)}
        steps = f"steps {self._first} to {step}" if self._first < step else f"step {step}"
        for layer, row in routed.items():
            self._say(layer, describe_load(row, self._topk), steps)
        values: dict[str, Any] = {
            "idle_experts": sum(row.count(0) for row in routed.values()),
            "largest_load": max((max(row) * len(row) / sum(row) for row in routed.values()), default=0.0),
        }
        self._session.attempt.event(ROUTING, step=step, **values, loads=routed)
        self._session.reporter.log_scalars(step, {f"{ROUTING}/{name}": value for name, value in values.items()})
        self._loads.zero_()
        self._first = step + 1

    def _say(self, layer: int, problem: str, steps: str) -> None:
        """Print a problem when it begins or changes."""
        if problem and self._said.get(layer) != problem:
            self._session.reporter.print_line(f"{steps}: layer {layer}: {problem}")
        self._said[layer] = problem


def describe_load(row: list[int], topk: int) -> str:
    """What is wrong with the tokens of the experts of a layer; empty if each has some."""
    idle, busy = ([expert for expert, count in enumerate(row) if bool(count) == is_busy] for is_busy in (False, True))
    if len(busy) == topk < len(row):
        return f"all tokens go to {_list('expert', busy)}: raise moe_aux_loss_coeff, or lower lr"
    return f"{_list('expert', idle)} of {len(row)} got no token" if idle else ""


def is_router(module: torch.nn.Module) -> bool:
    return isinstance(module, Router)


def _number(name: str, model: Transformer) -> int:
    """The layer of a module; those of multi-token prediction follow the others."""
    kind, number, *_ = name.split(".")
    return int(number) + (model.spec.num_layers if kind == "predictions" else 0)


def _list(noun: str, numbers: list[int], most: int = 8) -> str:
    text = ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
    return f"{noun}{'s' if len(numbers) > 1 else ''} {text}"
