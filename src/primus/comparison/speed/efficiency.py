"""What tokens cost: MFU, energy and money, with what makes a number impossible."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar, get_args

import msgspec
from msgspec import Struct

from primus.comparison.results.result import ComparisonResult
from primus.config.extended_files import load_model
from primus.errors import PrimusError, UsageError
from primus.machine.profile import Dtype, find_peak_tflops, find_profile_by_name
from primus.models.counts import Convention, flops_per_token

T = TypeVar("T")
HIGHEST_MFU = 1.0
DOUBTFUL_MFU = 0.75
"""No published training of a dense model reaches it; the best are near 0.6 (arXiv 2402.15627, Megatron-LM's README)."""
CONVENTIONS: tuple[Convention, ...] = ("causal", "full")
MILLION = 1e6
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "bf16": "bf16", "fp32": "fp32"}


class DevicePrice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of an hour of a device."""

    device: str
    """The model, such as `MI300X`, or the device's name as the report shows it."""
    per_device_hour: float
    currency: str
    source: str
    """The source of the price."""
    date: datetime.date
    """The date on which the price was valid."""


class UtilizationEstimate(Struct, frozen=True, kw_only=True):
    """The share of a device's dense peak that a speed is."""

    causal: float | None
    """Attention counted for the keys that a token sees."""
    full: float | None
    """Attention counted for all keys."""
    peak_tflops: float | None
    problem: str = ""
    """The reason why the speed is impossible; empty if it is possible."""
    doubt: str = ""
    """The reasons why the speed is doubtful."""


def estimate_utilization(result: ComparisonResult, tokens_per_s_per_device: float | None) -> UtilizationEstimate:
    """MFU by both conventions, recomputed from the speed; None where the model or the peak is not known."""
    peak = result.flops.peak_tflops or _find_peak(result)
    flops = _count_flops(result)
    if peak is None or tokens_per_s_per_device is None:
        return UtilizationEstimate(causal=None, full=None, peak_tflops=peak)
    shares = {name: tokens_per_s_per_device * count / (peak * 1e12) for name, count in flops.items()}
    lowest = min(shares.values(), default=0.0)
    problem = doubt = ""
    numbers = f"{tokens_per_s_per_device:,.0f} tokens/s per device is {lowest:.2f} of the dense peak"
    if lowest > HIGHEST_MFU:
        problem = f"{numbers} ({peak:,.0f} TFLOP/s): impossible"
    elif lowest > DOUBTFUL_MFU:
        doubt = f"{numbers}: doubtful, check batch size, sequence length and time"
    return UtilizationEstimate(
        causal=shares.get("causal"), full=shares.get("full"), peak_tflops=peak, problem=problem, doubt=doubt
    )


def compute_joules_per_million_tokens(runs: Sequence[ComparisonResult], warm_up_steps: int) -> float | None:
    """Median over the runs of the energy of devices in the measured steps by their tokens; None if it was not read."""
    found = [value for run in runs if (value := _compute_joules(run, warm_up_steps)) is not None]
    return median(found) * MILLION if found else None


def compute_cost_per_million_tokens(price: DevicePrice, tokens_per_s_per_device: float) -> float:
    """Price of a million tokens at this speed."""
    return price.per_device_hour / (3600 * tokens_per_s_per_device) * MILLION


def read_prices(path: Path) -> list[DevicePrice]:
    """The prices in a YAML file: a list of `DevicePrice`.

    Raises:
        UsageError: The file cannot be read, is not such a list, or a price has no source.
    """
    example = "{device: MI300X, per_device_hour: 2.0, currency: USD, source: URL, date: 2026-01-31}"
    found = read_entries(path, DevicePrice, "prices", f"an entry is {example}")
    wrong = next((each for each in found if not each.source or each.per_device_hour <= 0), None)
    if wrong is not None:
        raise UsageError(f"{path}: the price of {wrong.device} has no source, or is not positive")
    return found


def read_entries(path: Path, kind: type[T], what: str, form: str) -> list[T]:
    """The entries of a list in a YAML file; `what` names them, and `form` says what an entry looks like.

    Raises:
        UsageError: The file cannot be read, or is not such a list.
    """
    import yaml

    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), list[kind])  # type: ignore[valid-type]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", f"name a YAML file of {what}") from None
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: not a list of {what}: {error}", form) from None


def find_price(prices: Sequence[DevicePrice], device: str) -> DevicePrice | None:
    """The price of exactly this model: that of an H100 is not the price of an H100 PCIe, nor H20's that of an H200."""
    named = next((price for price in prices if price.device.lower() == device.lower()), None)
    model = find_profile_by_name(device)
    if named is not None or model is None:
        return named
    return next((price for price in prices if find_profile_by_name(price.device) == model), None)


def _find_peak(result: ComparisonResult) -> float | None:
    precision = result.precision or str(result.settings.get("precision", "bf16"))
    dtype = next((width for width in ("fp8", "fp4") if width in precision), DTYPES.get(precision, precision))
    known = next((each for each in get_args(Dtype) if each == dtype), None)
    return find_peak_tflops(result.gpu_info.device_name, known) if known and result.gpu_info.device_name else None


def _count_flops(result: ComparisonResult) -> dict[str, float]:
    """FLOPs of a token by convention; of an unknown shape 6 by its parameters, which is less than any convention."""
    known = result.flops.by_convention
    counts: dict[str, float] = {name: known[name] for name in CONVENTIONS if name in known}
    length = result.training_config.sequence_length
    if not counts and result.cell.model and length:
        with contextlib.suppress(PrimusError):  # a model that has no preset
            spec = load_model(result.cell.model)
            counts = {name: flops_per_token(spec, length, name) for name in CONVENTIONS}
    parameters = result.model_info.total_params
    return counts or ({"6N": 6.0 * parameters} if parameters else {})


def _compute_joules(run: ComparisonResult, warm_up_steps: int) -> float | None:
    """Energy between the samples nearest to the measured steps, per token."""
    ended = run.steps.pair_values(run.steps.ended)
    tokens = run.steps.pair_values([count or None for count in run.steps.tokens])
    measured = sorted(ended)[warm_up_steps:]
    samples = list(_list_energy(run))
    if len(measured) < 2 or len(samples) < 2:
        return None
    begin, end = (min(samples, key=lambda sample: abs(sample[0] - ended[step])) for step in (measured[0], measured[-1]))
    seconds = end[0] - begin[0]
    if seconds <= 0:
        return None
    rate = sum(tokens.get(step, 0.0) for step in measured[1:]) / (ended[measured[-1]] - ended[measured[0]])
    return (end[1] - begin[1]) / seconds / rate if rate else None


def _list_energy(run: ComparisonResult) -> Iterator[tuple[float, float]]:
    """Time and energy: of the CPUs if they trained, else of the GPUs by their counters, or by their power."""
    if run.platform == "cpu":
        yield from ((each.time, each.host_energy_j) for each in run.load.samples if each.host_energy_j is not None)
        return
    # The energy of GPUs that the run did not use is not its own.
    count, energy, before = run.gpu_info.device_count, 0.0, None
    counted = [(each.time, _list_known(each.device_energy_j)) for each in run.load.samples]
    counted = [(time, energies) for time, energies in counted if len(energies) == count]
    if counted:
        yield from ((time, sum(energies)) for time, energies in counted)
        return
    for sample in run.load.samples:
        powers = _list_known(sample.device_power_w)
        if len(powers) != count:
            continue
        if before is not None:
            energy += (sample.time - before[0]) * (before[1] + sum(powers)) / 2
        before = sample.time, sum(powers)
        yield sample.time, energy


def _list_known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
