"""Scaled dot-product attention, forward and backward, by each installed implementation: TFLOP/s."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, check_choice, check_positive, parse_sizes
from primus.errors import PrimusError, UsageError
from primus.process import run_command

if TYPE_CHECKING:
    from primus.measure.kernels.attention import AttentionShape

BACKENDS = ("math", "flash", "efficient", "cudnn", "default", "flash_attn", "aiter", "ck")
MODELS = {
    "llama2_7B": 4096,
    "llama2_70B": 4096,
    "llama3_8B": 8192,
    "llama3_70B": 8192,
    "mixtral_8x7B_v0.1": 4096,
    "mixtral_8x22B_v0.1": 4096,
}
"""Presets that `all` means, with the tokens of a sequence: the shapes of AMD-AGI/Primus' benchmark."""
ALL = "all"


class AttentionHeads(NamedTuple):
    """Sizes of one attention, without its batch."""

    model: str
    seqlen: int
    heads: int
    groups: int
    head_dim: int
    v_head_dim: int
    causal: bool
    window: int | None


PositiveSize = Annotated[int, Meta(ge=1)]
CK_TIME = re.compile(r"([\d.]+)\s*ms\b")
CK_PASSES = 5
"""Starts of a program of Composable Kernel, each of which repeats its kernel."""


class ShapeEntry(Struct, frozen=True):
    """A shape of a file of `--shapes-json-path`."""

    seqlen_q: PositiveSize
    seqlen_kv: PositiveSize
    num_head_q: PositiveSize
    num_head_kv: PositiveSize
    head_dim_qk: PositiveSize
    head_dim_v: PositiveSize
    causal: bool = True
    model: str = ""


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark attention`."""

    output_file: Annotated[
        tuple[str, ...], Meta(extra={"aliases": ("--output", "-o", "--report-csv-path", "--report_csv_path")})
    ] = ()
    """Result file, format by suffix: .md .txt .csv .tsv .json .jsonl .jsonl.gz .html; `-` prints Markdown."""
    models: Annotated[str | None, Meta(extra={"aliases": ("--model",)})] = None
    """Model presets, separated by commas, whose heads are taken, or `all`; without them --heads, --groups and
    --head-dim."""
    skip_models: str = ""
    """Model presets that are not measured, separated by commas."""
    shapes_json_path: str | None = None
    """JSON file with a list of shapes instead: model, seqlen_q, seqlen_kv, num_head_q, num_head_kv, head_dim_qk,
    head_dim_v, causal; --models and --skip-models choose from it."""
    batch: Annotated[str, Meta(extra={"aliases": ("--mbs-list", "--mbs_list", "--mbs")})] = "1"
    """Sequences of a micro batch: a number, a list, or a range."""
    seqlen: str | None = None
    """Tokens of a sequence: a number, a list 1024,4096, or a range 1024:16384:x2 (default: 2048; of --models all 4096
    or 8192)."""
    heads: Annotated[int, Meta(extra={"aliases": ("--num-attention-heads", "--num_attention_heads")})] = 32
    """Query heads."""
    groups: Annotated[int | None, Meta(extra={"aliases": ("--num-key-value-heads", "--num_key_value_heads")})] = None
    """Key/value heads (default: as many as query heads)."""
    head_dim: int = 128
    """Width of a query and key head."""
    v_head_dim: int | None = None
    """Width of a value head, as in latent attention (default: --head-dim)."""
    causal: bool = True
    """Each token sees the tokens before it."""
    window: int | None = None
    """Maximum tokens that a query sees (default: all)."""
    mode: tuple[Literal["warm", "cold"], ...] = ("warm",)
    """Cache state: warm (same operands in every call), cold (cache emptied before each call)."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type."""
    backend: str = "all"
    """Implementations, separated by commas: math, flash, efficient, cudnn (of PyTorch), default (which PyTorch
    chooses), flash_attn, aiter, ck (the programs tile_example_fmha_fwd and _bwd of Composable Kernel); or all."""
    forward_only: bool = False
    """Leave the backward pass out."""


def check_options(options: Options) -> None:
    """Refuse sizes that are not positive, unknown implementations, and files that are no list of shapes."""
    for name in _list_backends(options):
        check_choice(name, BACKENDS, "--backend")
    check_positive(options, ("heads", "groups", "head_dim", "v_head_dim", "window"))
    parse_sizes(options.batch, "--batch")
    if options.heads % (options.groups or options.heads):
        raise UsageError(f"--groups {options.groups}: does not divide --heads {options.heads}")
    if not _list_heads(options):
        raise UsageError("--models, --skip-models: no shape remains")


def _list_backends(options: Options) -> list[str]:
    return list(BACKENDS) if options.backend == ALL else options.backend.split(",")


def _list_heads(options: Options) -> list[AttentionHeads]:
    """What to measure, without the batches."""
    if options.shapes_json_path is not None:
        return _read_shapes(options)
    lengths = parse_sizes(options.seqlen, "--seqlen") if options.seqlen is not None else []
    if options.models is None:
        v_head_dim, groups = options.v_head_dim or options.head_dim, options.groups or options.heads
        sizes = (options.heads, groups, options.head_dim, v_head_dim, options.causal, options.window)
        return [AttentionHeads("", seqlen, *sizes) for seqlen in lengths or [2048]]
    names = list(MODELS) if options.models == ALL else options.models.split(",")
    own_lengths = {name.lower(): seqlen for name, seqlen in MODELS.items()}
    skipped = options.skip_models.split(",")
    return [
        heads
        for name in names
        if name not in skipped
        for heads in _find_heads_of_model(name, lengths or [own_lengths.get(name.lower(), 2048)], options)
    ]


def _find_heads_of_model(name: str, lengths: Sequence[int], options: Options) -> list[AttentionHeads]:
    from primus.config.extended_files import load_model
    from primus.models.counts import head_dim, num_query_groups, value_head_dim

    spec = load_model(name)
    # Latent attention trains with a key/value head for each query head (DeepSeek-V2, arXiv:2405.04434).
    groups = spec.num_attention_heads if spec.multi_latent_attention else num_query_groups(spec)
    sizes = (spec.num_attention_heads, groups, head_dim(spec), value_head_dim(spec))
    window = options.window or spec.window_size
    return [AttentionHeads(name, seqlen, *sizes, options.causal, window) for seqlen in lengths]


def _read_shapes(options: Options) -> list[AttentionHeads]:
    """The shapes of a file of AMD-AGI/Primus' format, as far as they are chosen."""
    path = str(options.shapes_json_path)
    try:
        entries = msgspec.json.decode(Path(path).read_bytes(), type=list[ShapeEntry])
    except OSError as error:
        raise UsageError(f"--shapes-json-path {path}: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"--shapes-json-path {path}: not a list of shapes: {error}") from None
    chosen = None if options.models in (None, ALL) else str(options.models).split(",")
    found = []
    for number, entry in enumerate(entries, 1):
        if entry.seqlen_q != entry.seqlen_kv or entry.num_head_q % entry.num_head_kv:
            raise UsageError(
                f"--shapes-json-path {path}: shape {number}: expected seqlen_q equal to seqlen_kv, and num_head_q"
                " a multiple of num_head_kv"
            )
        if (chosen is None or entry.model in chosen) and entry.model not in options.skip_models.split(","):
            sizes = (entry.num_head_q, entry.num_head_kv, entry.head_dim_qk, entry.head_dim_v)
            found.append(AttentionHeads(entry.model, entry.seqlen_q, *sizes, entry.causal, options.window))
    return found


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each implementation, size and direction; one that fails is a row with its error."""
    from primus.measure.kernels.attention import AttentionShape, measure_attention

    sizes = itertools.product(_list_heads(options), parse_sizes(options.batch, "--batch"))
    for (heads, batch), backend in itertools.product(sizes, _list_backends(options)):
        shape = AttentionShape(batch, *heads[1:])
        for is_backward in (False,) if options.forward_only else (False, True):
            if backend == "ck":
                yield _measure_ck(options, context, heads.model, shape, is_backward=is_backward)
            else:
                yield from measure_attention(
                    context, shape, backend, options.dtype, is_backward=is_backward, model=heads.model
                )


def _measure_ck(
    options: Options, context: BenchmarkContext, model: str, shape: AttentionShape, *, is_backward: bool
) -> BenchmarkRow:
    """The row of a program of Composable Kernel, which times the kernel itself."""
    from primus.measure.storage.timed_passes import PassAmount, measure_passes

    words = [
        f"tile_example_fmha_{'bwd' if is_backward else 'fwd'}",
        *(f"-b={shape.batch}", f"-h={shape.heads}", f"-h_k={shape.groups}", f"-s={shape.seqlen}"),
        *(f"-d={shape.head_dim}", f"-d_v={shape.v_head_dim}", f"-prec={options.dtype}", "-v=0"),
        f"-mask={_format_ck_mask(shape)}",
    ]

    def run_pass() -> float:
        done = run_command(words, limit_s=options.time_limit)
        match = CK_TIME.search(done.text) if done.state == "ok" else None
        if match is None:
            raise PrimusError(f"{words[0]}: {done.problem or 'printed no time'}")
        return float(match[1]) / 1e3

    return measure_passes(
        context,
        shape.describe_case("ck", options.dtype, is_backward=is_backward, model=model),
        run_pass,
        PassAmount(
            shape.count_flop(is_backward=is_backward) / 1e12,
            "TFLOP/s",
            "ck: FLOP as for the others / median of the times that the program of Composable Kernel prints",
        ),
        longest_s=options.duration,
        most_passes=CK_PASSES,
    )


def _format_ck_mask(shape: AttentionShape) -> str:
    """0, or `t:LEFT,RIGHT` as the window from the top left corner (ROCm/composable_kernel, example 01_fmha)."""
    if shape.window is not None and shape.window < shape.seqlen:
        return f"t:{shape.window - 1},{0 if shape.causal else shape.window - 1}"
    return "t" if shape.causal else "0"
