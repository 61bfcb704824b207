"""The share of time that a job of N nodes trains, and the interval of checkpoints that makes it largest.

Failures are a Poisson process, as in J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22 (2006) 303-312: with a mean time M between failures of the job, a
stall C for each checkpoint, an outage R until training goes on after a failure, and training for T between two
checkpoints, a time T of training takes M exp(R/M) (exp((T+C)/M) - 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

PUBLISHED_RATE = 6.5
"""Failures of a node in 1000 days."""
RATE_SOURCE = (
    "A. Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters (2024,"
    " arXiv:2410.21680): 6.50 failures in 1000 node-days in the cluster RSC-1, 2.34 in RSC-2; nodes of 8 A100"
)
DAY_S = 86400.0
LEAST_STALL_S = 1e-3
"""A checkpoint costs something: without this, an immeasurably short stall would ask for one after each step."""


class GoodputEstimate(Struct, frozen=True, kw_only=True):
    """What to expect at one number of nodes."""

    nodes: int
    mtbf_s: float
    """Mean time between failures of the job."""
    interval_s: float
    """Training between two checkpoints at which the goodput is largest."""
    interval_steps: int
    goodput: float
    """Share of the time in which steps are taken that count."""
    goodput_hourly: float
    """The same with a checkpoint in each hour of training."""


def estimate_goodput(
    nodes: Iterable[int], *, failures_per_1000_node_days: float, stall_s: float, outage_s: float, step_s: float
) -> list[GoodputEstimate]:
    """The best interval of checkpoints and the goodput at each number of nodes.

    Args:
        nodes: Numbers of nodes.
        failures_per_1000_node_days: Rate at which one node fails.
        stall_s: Time that training waits for a checkpoint.
        outage_s: From a failure until training goes on: detection and restart.
        step_s: Time of a step.
    """
    stall_s = max(stall_s, LEAST_STALL_S)
    found = []
    for count in nodes:
        mtbf_s = 1000 * DAY_S / failures_per_1000_node_days / count
        interval_s = max(step_s, find_best_interval(mtbf_s, stall_s))
        found.append(
            GoodputEstimate(
                nodes=count,
                mtbf_s=mtbf_s,
                interval_s=interval_s,
                interval_steps=max(1, round(interval_s / step_s)),
                goodput=compute_goodput(interval_s, mtbf_s, stall_s, outage_s),
                goodput_hourly=compute_goodput(3600.0, mtbf_s, stall_s, outage_s),
            )
        )
    return found


def find_best_interval(mtbf_s: float, stall_s: float) -> float:
    """Daly's estimate of the best time between checkpoints (equation 37); Young's sqrt(2 C M) is its first term."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def compute_goodput(interval_s: float, mtbf_s: float, stall_s: float, outage_s: float) -> float:
    """Share of the time in which steps are taken that count: T over the time that T takes."""
    exponent = (interval_s + stall_s) / mtbf_s
    if exponent + outage_s / mtbf_s > 700:  # beyond what a float holds: the job never reaches a checkpoint
        return 0.0
    return interval_s / (mtbf_s * math.exp(outage_s / mtbf_s) * math.expm1(exponent))
