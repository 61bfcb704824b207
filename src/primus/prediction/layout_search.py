"""The layout that is predicted to train fastest: those that the engine accepts, pruned by memory, ranked by time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from msgspec import Struct, structs

from primus.config.schema import Experiment, ParallelConfig, Trainer
from primus.errors import UsageError
from primus.models import model_checks
from primus.prediction.device_rates import DeviceRates
from primus.prediction.step_layout import Precision, StepLayout, build_layout
from primus.prediction.step_memory import GIB, StepMemory, find_largest, predict_memory
from primus.prediction.step_time import StepTime, predict_step

MICRO_BATCHES = (1, 2, 4, 8, 16)
MOST_TENSOR = 16
MOST_CONTEXT = 16
SHORT_SEQUENCE = 8192
"""Up to which a sequence is not divided."""
VIRTUAL_KEY = "num_virtual_stages_per_pipeline_rank"
USABLE_MEMORY = 0.95
"""Of a device's memory, that a layout may take; what is left covers the error of the prediction."""
BATCH_SLACK = 1.25
"""Of the tokens asked for in a step, that a layout may take where its replicas do not divide them."""
MOST_NODES = 256


class Candidate(Struct, frozen=True, kw_only=True):
    """A layout that the engine accepts."""

    trainer: Trainer
    layout: StepLayout
    memory: StepMemory
    """Of the stage that needs most."""
    time: StepTime | None = None
    """None until it is asked for."""

    @property
    def tokens_per_s(self) -> float:
        assert self.time
        return self.time.tokens_per_s_per_device


class LayoutChoice(Struct, frozen=True, kw_only=True):
    """Layouts that fit, the fastest first."""

    fitting: list[Candidate]
    num_accepted: int
    """Layouts that the engine accepts, whether they fit or not."""
    least: Candidate | None
    """The one that needs least memory; None if the engine accepts none."""
    limit_bytes: float


class LayoutRequest(Struct, frozen=True, kw_only=True):
    """What to search for."""

    experiment: Experiment
    """The model, its framework, length and precision."""
    check: Callable[[Experiment], None]
    """The framework's own check."""
    rates: DeviceRates
    devices_of_node: int
    batch_tokens: int
    """Tokens of a step."""
    precision: Precision | None = None
    """Of products, whatever the engine's settings say; None for theirs."""


def choose_layout(request: LayoutRequest, nodes: int) -> LayoutChoice:
    """The layouts of a model on `nodes` nodes.

    Raises:
        UsageError: The memory of the device is not known, or the engine cannot train the model.
    """
    limit = _find_limit(request.rates)
    accepted = list(_list_candidates(request, nodes))
    if not accepted:
        request.check(request.experiment)  # an engine that cannot train the model at all says so itself
    spec = request.experiment.trainer.model
    fitting = [
        structs.replace(each, time=predict_step(spec, each.layout, request.rates))
        for each in accepted
        if each.memory.total <= limit
    ]
    fitting.sort(key=lambda each: (-each.tokens_per_s, each.layout.format_settings()))
    least = min(accepted, key=lambda each: each.memory.total, default=None)
    return LayoutChoice(fitting=fitting, num_accepted=len(accepted), least=least, limit_bytes=limit)


def _find_limit(rates: DeviceRates) -> float:
    if rates.memory_bytes:
        return rates.memory_bytes * USABLE_MEMORY
    raise UsageError(
        f"the profile {rates.name} lacks memory_bytes: what fits cannot be predicted",
        f"put {rates.name}.yaml with it into profiles/ of a folder of $PRIMUS_PLUGINS (extends: {rates.name})",
    )


def find_smallest_cluster(request: LayoutRequest, above: int) -> int | None:
    """The least number of nodes above `above` on which a layout fits, up to `MOST_NODES`; None if none does."""

    limit = _find_limit(request.rates)

    def fits(nodes: int) -> bool:
        return any(each.memory.total <= limit for each in _list_candidates(request, nodes))

    upper = next((nodes for nodes in _double(above) if fits(nodes)), None)
    if upper is None:
        return None
    # Between two powers of two the layouts differ, so that each is tried.
    return next(nodes for nodes in range(max(above, upper // 2) + 1, upper + 1) if nodes == upper or fits(nodes))


def _double(above: int) -> Iterator[int]:
    nodes = 1
    while nodes <= MOST_NODES:
        if nodes > above:
            yield nodes
        nodes *= 2


def _list_candidates(request: LayoutRequest, nodes: int) -> Iterator[Candidate]:
    """Every layout that the engine accepts, with its memory."""
    devices = nodes * request.devices_of_node
    trainer = request.experiment.trainer
    sequences = max(1, request.batch_tokens // trainer.training.seq_length)
    for parallel, virtual in _list_parallel(request, devices):
        data = devices // (
            parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
        )
        shape = _Shape(parallel, virtual, data)
        if _accepts(request, trainer, shape):
            for changed in _list_batches(trainer, shape, sequences):
                layout = build_layout(changed, devices)
                layout = structs.replace(layout, precision=request.precision or layout.precision)
                memory = find_largest(predict_memory(trainer.model, layout))
                yield Candidate(trainer=changed, layout=layout, memory=memory)


class _Shape(Struct, frozen=True):
    parallel: ParallelConfig
    virtual: int
    data: int


def _list_parallel(request: LayoutRequest, devices: int) -> Iterator[tuple[ParallelConfig, int]]:
    """Sizes that divide the devices and the model, with groups of layers of a stage."""
    spec, seq_length = request.experiment.trainer.model, request.experiment.trainer.training.seq_length
    base = request.experiment.trainer.parallel
    tensors = [size for size in _list_powers(MOST_TENSOR) if request.devices_of_node % size == 0]
    pipelines = [size for size in range(1, spec.num_layers + 1) if spec.num_layers % size == 0]
    contexts = _list_powers(max(1, min(MOST_CONTEXT, seq_length // SHORT_SEQUENCE)))
    experts = [size for size in range(1, (spec.num_experts or 1) + 1) if (spec.num_experts or 1) % size == 0]
    for tensor, pipeline, context, expert in product(tensors, pipelines, contexts, experts):
        of_stage, rest = divmod(devices, pipeline)
        if rest or of_stage % (tensor * context) or of_stage % expert:
            continue
        parallel = structs.replace(
            base,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            sequence_parallel=tensor > 1,
        )
        if next(model_checks.find_parallel_problems(spec, parallel, seq_length), None):
            continue
        layers = spec.num_layers // pipeline
        has_groups = pipeline > 1 and request.experiment.trainer.framework == "native"
        for virtual in [size for size in (1, 2, 4) if layers % size == 0] if has_groups else [1]:
            yield parallel, virtual


def _list_powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _accepts(request: LayoutRequest, trainer: Trainer, shape: _Shape) -> bool:
    """Whether the framework's own check, as `config check` uses it, accepts the layout."""
    asked = structs.replace(request.experiment, trainer=_lay_out(trainer, shape))
    try:
        request.check(asked)
    except UsageError:
        return False
    return True


def _lay_out(trainer: Trainer, shape: _Shape) -> Trainer:
    own = {VIRTUAL_KEY: shape.virtual} if shape.virtual > 1 else {}
    return structs.replace(trainer, parallel=shape.parallel, backend_args=trainer.backend_args | own)


def _list_batches(trainer: Trainer, shape: _Shape, sequences: int) -> Iterator[Trainer]:
    """Micro batches with and without recomputation; the global batch is the nearest above that divides."""
    placed = _lay_out(trainer, shape)
    for micro_batch in MICRO_BATCHES:
        one_pass = micro_batch * shape.data
        batch = -(-sequences // one_pass) * one_pass
        if batch > max(BATCH_SLACK * sequences, shape.data):
            break
        for recompute in (False, True):
            training = structs.replace(
                trainer.training,
                micro_batch_size=micro_batch,
                global_batch_size=batch,
                recompute_activations=recompute,
            )
            yield structs.replace(placed, training=training)


def explain_loss(best: Candidate, other: Candidate) -> str:
    """Why a runner-up is slower: the terms that grew most, as shares of the best one's time for the same tokens."""
    assert best.time and other.time
    scale = best.time.tokens / other.time.tokens
    whole = best.time.seconds
    grown = {name: (other.time.terms[name] * scale - seconds) / whole for name, seconds in best.time.terms.items()}
    named = sorted(grown.items(), key=lambda pair: -pair[1])[:2]
    reasons = [f"{name} +{share:.1%}" for name, share in named if share > 0.0005]
    slower = best.tokens_per_s / other.tokens_per_s - 1
    return f"{slower:.1%} slower: {', '.join(reasons) or 'as fast within the rounding'}"


def choose_runners_up(choice: LayoutChoice, number: int = 3) -> list[Candidate]:
    """The next ones whose sizes differ from those before, so that they are not one layout with other batches."""
    found: list[Candidate] = []
    seen = {_list_sizes(choice.fitting[0])}
    for each in choice.fitting[1:]:
        if _list_sizes(each) not in seen:
            seen.add(_list_sizes(each))
            found.append(each)
        if len(found) == number:
            break
    return found or choice.fitting[1 : 1 + number]


def _list_sizes(each: Candidate) -> tuple[int, ...]:
    layout = each.layout
    return (layout.tensor, layout.pipeline, layout.context, layout.expert)


def format_misfit(choice: LayoutChoice, nodes: int) -> str:
    """By how much nothing fits."""
    least = choice.least
    if least is None:
        return f"no layout divides the model over the devices of {nodes} nodes"
    need, limit = least.memory.total, choice.limit_bytes
    return (
        f"the layout that needs least ({least.layout.format_settings()}) takes {need / GIB:,.1f} GiB of the"
        f" {limit / GIB:,.1f} GiB of a device that a step may use ({need / limit:.2g} x)"
    )
