"""Matrix products of an experiment on a CPU: collected, tuned, compared in real steps, kept for later runs.

Files of the folder of a search, each replaced in one step, so that a kill loses at most what is being measured:

    products.json      collect    the products of one step
    parts/KEY.json     tune       the forms of one product
    table.json         tune       all of them, as the compared run uses them
    comparison.json    check      real steps with and without them
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, structs

from primus import experiment, registry
from primus.backend import BACKENDS
from primus.config.load import Resolved
from primus.errors import PrimusError, UnfitError, UsageError
from primus.process import count_usable_cpus
from primus.report import table
from primus.runs import tuned_files
from primus.runs.files import read_json, to_json, write_json
from primus.runs.run_steps import load_run_steps
from primus.task import TaskContext
from primus.tasks.tune._gemm_options import GemmOptions
from primus.tasks.tune._training import run_training
from primus.tuning.claim import claim_folder
from primus.tuning.product_table import (
    COMPARISON_VARIABLE,
    DEFAULT,
    RECORD_VARIABLE,
    ProductTable,
    StepComparison,
    TunedProduct,
    keep_products,
    merge_tables,
    read_product_table,
    write_product_table,
)
from primus.tuning.products import ProductList, multiply_counts, read_product_list, sort_products, write_product_list
from primus.tuning.step_comparison import compare_step_times

ShowProgress = Callable[[TaskContext, int, str], None]
"""Shows how many products are done, and a line about the last."""
RECORDED_STEPS = 3
_Earlier = TypeVar("_Earlier")
MOST_LISTED = 30


class ProductTuningResult(Struct, frozen=True, kw_only=True):
    """The result of the stages so far."""

    folder: str
    valid_for: dict[str, str]
    collected: ProductList
    tuned: list[TunedProduct] = []
    comparison: StepComparison | None = None
    kept: str | None = None
    """File that later runs use."""


class ProductSearch(Struct, frozen=True, kw_only=True):
    """The tuning of one experiment on this machine."""

    options: GemmOptions
    context: TaskContext
    resolved: Resolved
    folder: Path
    valid_for: dict[str, str]

    def describe_stage(self, name: str) -> str:
        """The command of one stage."""
        return f"tune gemm --config {self.options.config} --stage {name}"


def tune_experiment(options: GemmOptions, context: TaskContext) -> None:
    """Run the stages that are asked for.

    Raises:
        UnfitError: PyTorch is not installed, or the machine's GPUs have no tuner for collected products.
        UsageError: The experiment is invalid, an earlier stage is missing, or this machine is tuning already.
        PrimusError: The step or the run fails.
    """
    resolved = resolve_experiment(options, context)
    if context.layout is not None and context.layout.nnodes > 1:
        raise UsageError("tune gemm on a CPU runs on one node", "start it without --nnodes")
    # The machine before the folder, in every command: two commands cannot wait for each other.
    with claim_machine(context.environ), _open_search(options, context, resolved) as search:
        # Each stage reads what the one before has written, so that it can be started alone, on another day.
        collected = _collect_products(search)
        result = ProductTuningResult(folder=str(search.folder), valid_for=search.valid_for, collected=collected)
        if options.stage in ("all", "tune"):
            result = structs.replace(result, tuned=_tune_products(search, collected))
        elif options.stage in ("check", "use"):
            result = structs.replace(result, tuned=_read_tuned_products(search))
        if options.stage in ("all", "check") and _list_winners(result.tuned):
            result = structs.replace(result, comparison=_compare_steps(search, result.tuned))
        if options.stage in ("all", "use"):
            result = _keep_result(search, result)
    context.result(result, format_result(result, options.stage))


def list_plan_notes(options: GemmOptions, context: TaskContext) -> Sequence[str]:
    """What a dry run prints."""
    resolved = resolve_experiment(options, context)
    stages = "collect, tune, check, use" if options.stage == "all" else options.stage
    name = resolved.experiment.exp_name
    return [
        f"stages: {stages}; results below {Path(options.workspace) / 'tune'}/{name}-gemm-*",
        f"later runs use {tuned_files.find_store(context.environ)}/gemm-*.json",
    ]


def format_result(result: ProductTuningResult, stage: str) -> str:
    """The products as a table, and what follows."""
    calls = {each.product.key: each.calls for each in result.collected.products}
    if not result.tuned:
        rows = [[key, str(number)] for key, number in list(calls.items())[:MOST_LISTED]]
        lines = [table.format_table(["product", "calls in a step"], rows, right=(1,))]
        lines += [f"{len(calls)} products in a step, from {result.collected.source}; {result.folder}/products.json"]
        return "\n".join(lines)
    rows = [_format_row(each, calls.get(each.product.key, 0)) for each in result.tuned[:MOST_LISTED]]
    lines = [table.format_table(["product", "calls", "default us", "form", "time", ""], rows, right=(1, 2, 4))]
    if len(result.tuned) > MOST_LISTED:
        lines.append(f"and {len(result.tuned) - MOST_LISTED} more in {result.folder}/table.json")
    winners = _list_winners(result.tuned)
    lines.append(f"{len(winners)} of {len(result.tuned)} products have a faster form than the default")
    if result.comparison is not None:
        lines.append(f"real steps: {result.comparison} ({result.comparison.num_steps} steps in turn)")
    if stage in ("all", "use"):
        lines.append(_format_end(result))
    return "\n".join(lines)


def _format_end(result: ProductTuningResult) -> str:
    if result.comparison is not None and result.comparison.is_faster:
        return f"kept: later runs use it ({result.kept}); direct --no-tuned disables it"
    reason = "the interval contains no gain" if result.comparison is not None else "no product has a faster form"
    return f"not used by later runs: {reason}"


def _format_row(tuned: TunedProduct, calls: int) -> list[str]:
    base = next((timing.median_us for timing in tuned.timings if timing.form == DEFAULT), None)
    time_text = f"x {tuned.ratio:.2f}" if tuned.form != DEFAULT else ""
    return [tuned.product.key, str(calls), table.format_number(base), tuned.form, time_text, tuned.problem[:60]]


def resolve_experiment(options: GemmOptions, context: TaskContext) -> Resolved:
    """The experiment with the overrides of the command."""
    assert options.config is not None
    return experiment.resolve_experiment(Path(options.config), context.overrides, context.environ)


def uses_accelerators(options: GemmOptions, context: TaskContext) -> bool:
    """Whether the experiment trains on AMD GPUs, whose products hipblaslt-bench tunes.

    Raises:
        UnfitError: It trains on other GPUs.
    """
    resolved = resolve_experiment(options, context)
    devices = context.facts().devices
    if resolved.experiment.trainer.training.device == "cpu" or not devices:
        return False
    if all(device.vendor == "amd" for device in devices):
        return True
    raise UnfitError(
        "no tuner supports the matrix products of NVIDIA GPUs: cuBLAS has none, and TunableOp needs ROCm",
        "compiled kernels: tune inductor; products on the CPU: --device cpu",
    )


def claim_machine(environ: Mapping[str, str]) -> AbstractContextManager[None]:
    """Be the only one that measures on this machine: two would measure each other. See `claim_folder`."""
    # By host name: the folder may be on a file system that several machines share.
    folder = tuned_files.find_store(environ) / f"measuring-{socket.gethostname()}"
    return claim_folder(folder, "this machine is used for tuning")


@contextmanager
def _open_search(options: GemmOptions, context: TaskContext, resolved: Resolved) -> Iterator[ProductSearch]:
    try:
        import torch

        from primus.measure.product_tuning import describe_cpu_library
        from primus.session.torch_processes import device_name
    except ImportError as error:
        raise UnfitError(f"tune gemm needs PyTorch: {error}", "./primus-cli setup installs it") from None
    asked = resolved.experiment
    nproc = context.layout.nproc if context.layout else 1
    given = asked.env.get("OMP_NUM_THREADS") or context.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(given) if given and given.isdecimal() else max(1, count_usable_cpus() // nproc))
    # After the number of threads is set, which is part of the description: other threads, other fastest forms.
    valid_for = describe_cpu_library(device_name(torch.device("cpu")))
    # Whatever changes the products or their fastest forms begins a new search; an equal command continues this one.
    content = to_json(asked) + to_json(valid_for) + str(nproc) + " ".join(options.shapes)
    identity = hashlib.sha256(content.encode()).hexdigest()[:8]
    folder = Path(options.workspace) / "tune" / f"{asked.exp_name}-gemm-{identity}"
    with claim_folder(folder, f"{folder} is used"):
        yield ProductSearch(options=options, context=context, resolved=resolved, folder=folder, valid_for=valid_for)


def _collect_products(search: ProductSearch) -> ProductList:
    """The products of a step: those of an earlier call, of logs, of a real step, or of a step on fake tensors."""
    file = search.folder / "products.json"
    # An earlier list counts, whatever it came from: tuned parts and comparisons belong to its products.
    if file.is_file():
        return read_product_list(file)
    if search.options.shapes:
        from primus.tuning.product_logs import read_product_logs

        found = read_product_logs([Path(shape) for shape in search.options.shapes])
    elif search.options.record:
        return _record_products(search, file)
    else:
        found = trace_products(search.resolved, search.context, "cpu")
    write_product_list(file, found)
    return found


def trace_products(resolved: Resolved, context: TaskContext, device: str) -> ProductList:
    """The products of a step on fake tensors of `device`.

    Raises:
        UsageError: The backend has no such step.
        UnfitError: PyTorch is not installed.
    """
    try:
        from primus.measure.product_recorder import ProductRecorder
    except ImportError as error:
        raise UnfitError(f"tune gemm needs PyTorch: {error}", "./primus-cli setup installs it") from None
    asked = resolved.experiment
    backend = registry.load_plug_in(BACKENDS, asked.trainer.framework)
    recorder = ProductRecorder()
    try:
        backend.run_fake_step(asked, device, recorder)
    except NotImplementedError:
        raise UsageError(
            f"framework '{asked.trainer.framework}' has no step on fake tensors",
            "record a real step on a CPU by --record, or log one on GPUs: HIPBLASLT_LOG_MASK=32, then --shapes LOG",
        ) from None
    # The fake step is one micro batch of one process; a real step repeats its products by gradient accumulation.
    found = sort_products(recorder.counts, "a step on fake tensors")
    training = asked.trainer.training
    nproc = context.layout.nproc if context.layout else 1
    global_batch_size = training.global_batch_size or training.micro_batch_size * nproc
    return multiply_counts(found, max(1, global_batch_size // (training.micro_batch_size * nproc)))


def _record_products(search: ProductSearch, file: Path) -> ProductList:
    # Without tuned products: a table in use replaces the operators that are to be recorded.
    answer, run = run_training(
        str(search.options.config),
        search.context,
        {"train_iters": str(RECORDED_STEPS)},
        search.folder,
        limit_s=search.options.timeout,
        options=("--no-tuned", "--env", f"{RECORD_VARIABLE}={file.resolve()}"),
    )
    # The file decides, not the exit code: the products are written after step 2, and later steps do not matter.
    if not file.is_file():
        where = f"; see runs show {run.directory}" if run else ""
        raise PrimusError(
            f"the run recorded no products: {answer.problem or 'they are compiled'}", f"set compile=false{where}"
        )
    return read_product_list(file)


def _tune_products(search: ProductSearch, collected: ProductList) -> list[TunedProduct]:
    """Tune what is not tuned yet; each product is written at once."""
    from primus.measure.product_tuning import tune_product

    parts = search.folder / "parts"
    products = [each.product for each in collected.products]
    tuned: list[TunedProduct] = []
    with _open_bar(len(products)) as show:
        for number, product in enumerate(products, 1):
            part = parts / f"{hashlib.sha256(product.key.encode()).hexdigest()[:16]}.json"
            # The name is a digest, since a key has characters that a file name cannot have; the content decides.
            known = _read_earlier(part, TunedProduct)
            if known is None or known.product != product:
                known = tune_product(product, search.options.measure)
                write_json(part, known)
                chosen = known.problem or (f"{known.form} x {known.ratio:.2f}" if known.form != DEFAULT else DEFAULT)
                show(search.context, number, f"  {number} of {len(products)}: {product.key}: {chosen}")
            tuned.append(known)
    _write_table(search, tuned)
    return tuned


def _read_earlier(file: Path, kind: type[_Earlier]) -> _Earlier | None:
    """An earlier result; None if there is none, or it was cut off or edited."""
    try:
        return read_json(file, kind)
    except PrimusError:
        return None


def _write_table(search: ProductSearch, tuned: Sequence[TunedProduct]) -> None:
    """The table that the compared run uses, in which every winner applies."""
    winners = [structs.replace(each, is_kept=each.form != DEFAULT) for each in tuned]
    whole = ProductTable(created=time.time(), valid_for=search.valid_for, products=winners)
    write_product_table(search.folder / "table.json", whole)


def _read_tuned_products(search: ProductSearch) -> list[TunedProduct]:
    file = search.folder / "table.json"
    if not file.is_file():
        raise UsageError(f"{search.folder} has no tuned products", f"first: {search.describe_stage('tune')}")
    return read_product_table(file).products


def _list_winners(tuned: Sequence[TunedProduct]) -> list[TunedProduct]:
    return [each for each in tuned if each.form != DEFAULT]


def _compare_steps(search: ProductSearch, tuned: Sequence[TunedProduct]) -> StepComparison:
    """Take real steps with and without the tuned products in turn; an earlier comparison of the same table counts."""
    file = search.folder / "comparison.json"
    identity = hashlib.sha256(msgspec.json.encode([(each.product.key, each.form) for each in tuned])).hexdigest()
    known = _read_earlier(file, KeptComparison)
    # Other forms, or another number of steps, need a new comparison.
    if known is not None and known.identity == identity and known.steps == search.options.steps:
        return known.comparison
    # Both kinds of steps in one run, in turn: load and clock of the machine change between runs more than the gain.
    search.context.say(f"comparing {search.options.steps} real steps with and without tuned products")
    answer, run = run_training(
        str(search.options.config),
        search.context,
        # Compiled steps do not call the operators that a table replaces.
        {"train_iters": str(search.options.steps), "compile": "false"},
        search.folder,
        limit_s=search.options.timeout,
        options=(
            *("--env", f"{tuned_files.PRODUCTS_VARIABLE}={(search.folder / 'table.json').resolve()}"),
            *("--env", f"{COMPARISON_VARIABLE}=1"),
        ),
    )
    if run is None or answer.state != "ok":
        where = f": runs show {run.directory}" if run else ""
        raise PrimusError(f"the run that compares steps failed: {answer.problem}", f"see its log{where}")
    times = [time_s for time_s in load_run_steps(run).columns["step_time_s"] if time_s is not None]
    comparison = compare_step_times(times, search.resolved.experiment.exp_name, time.time())
    write_json(file, KeptComparison(identity=identity, steps=search.options.steps, comparison=comparison))
    return comparison


class KeptComparison(Struct, frozen=True, kw_only=True):
    """The comparison.json of a search."""

    identity: str
    """Of the products and forms that were compared."""
    steps: int
    comparison: StepComparison


def _keep_result(search: ProductSearch, result: ProductTuningResult) -> ProductTuningResult:
    """Write the table that later runs find, whether or not it is faster: they say which."""
    comparison = result.comparison
    if comparison is None and _list_winners(result.tuned):
        known = _read_earlier(search.folder / "comparison.json", KeptComparison)
        if known is None:
            raise UsageError("no real steps were compared yet", f"first: {search.describe_stage('check')}")
        comparison = known.comparison
    # Also without a gain: the table then says that it was compared, and later runs say why they do not use it.
    path = tuned_files.name_tuned_file(search.context.environ, "gemm", search.valid_for)
    new = ProductTable(
        created=time.time(),
        valid_for=search.valid_for,
        products=keep_products(result.tuned, comparison),
        comparisons=[comparison] if comparison else [],
    )
    # The file serves all experiments on this library: products and comparisons of the others stay.
    write_product_table(path, merge_tables(_read_old_table(path, search.context), new))
    return structs.replace(result, comparison=comparison, kept=str(path))


def _read_old_table(path: Path, context: TaskContext) -> ProductTable | None:
    """The table in use; a damaged one is moved aside."""
    if not path.is_file():
        return None
    try:
        return read_product_table(path)
    except PrimusError as error:
        # Moved, not removed: a person may have edited it.
        aside = path.with_suffix(".damaged")
        os.replace(path, aside)
        context.say(f"{error.problem}; it is moved to {aside}")
        return None


@contextmanager
def _open_bar(total: int) -> Iterator[ShowProgress]:
    """A progress bar on a terminal, lines elsewhere."""
    from primus.session.progress import ProgressBar

    try:
        bar = ProgressBar(os.ttyname(sys.stderr.fileno()), total, 0) if sys.stderr.isatty() else None
    except OSError:
        bar = None

    def show(context: TaskContext, number: int, text: str) -> None:
        if bar is None:
            context.say(text)
        else:
            bar.print(text)
            bar.update(number, "")

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
