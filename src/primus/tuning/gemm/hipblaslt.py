"""hipBLASLt's files: matrix products that it logged, and its tuning files of old and new column sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError
from primus.tuning.gemm.products import MatrixProduct

PROGRAM = "hipblaslt-bench"
CHOSEN = ("--algo_method", "--solution_index")
"""Options of a log line that name the solution that was used; without them all are tried."""
ALIASES = {"soulution_index": "solution_index"}
"""Older versions misspell the column."""
VERSION = "Git Version:"
"""First line of a tuning file; solution indices without names are valid for this version of the library only."""
NAMES = ("kernel_name", "solution_name")
"""Columns by which newer versions recognize a solution; a file with them may have no version."""


class GemmProblem(Struct, frozen=True, kw_only=True):
    """A matrix product that a training run computes."""

    args: tuple[str, ...]
    """Options of hipblaslt-bench, in the order of the log; flags without a value are kept."""
    count: int
    """Calls in the logs."""

    @property
    def key(self) -> str:
        """Names the problem in files."""
        return hashlib.sha256("\0".join(self.args).encode()).hexdigest()[:16]

    @property
    def shape(self) -> str:
        """`m x n x k` with transposes."""
        values = dict(zip(self.args, self.args[1:], strict=False))
        m, n, k = (values.get(f"-{name}", "?") for name in "mnk")
        return (
            f"{m} x {n} x {k} {values.get('--transA', '?')}{values.get('--transB', '?')} {values.get('--a_type', '')}"
        )


class TunedProblem(Struct, frozen=True, kw_only=True):
    """The entry of a tuning file for one problem."""

    header: str
    line: str
    values: dict[str, str]
    """Values by column; the columns depend on the version."""


class TuningFile(Struct, frozen=True, kw_only=True):
    """A tuning file, as HIPBLASLT_TUNING_OVERRIDE_FILE takes it."""

    version: str
    entries: list[TunedProblem]


def read_problems(files: Iterable[Path]) -> list[GemmProblem]:
    """The distinct problems in logs that HIPBLASLT_LOG_MASK=32 writes, the most frequent first.

    Raises:
        PrimusError: A file cannot be read, or no file has a problem.
    """
    counts: dict[tuple[str, ...], int] = {}
    read = list(files)
    for file in read:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise PrimusError(f"{file}: cannot be read: {error.strerror}") from None
        # The last line of a process that was killed may be cut off: without -m, -n and -k it is skipped.
        for line in text.splitlines():
            args = parse_log_line(line)
            if args:
                counts[args] = counts.get(args, 0) + 1
    if not counts:
        raise PrimusError(
            f"no line of {PROGRAM} in {', '.join(map(str, read))}",
            "log a few steps: --env HIPBLASLT_LOG_MASK=32 --env HIPBLASLT_LOG_FILE=dump_%i.txt, without "
            "HIPBLASLT_LOG_LEVEL",
        )
    return [GemmProblem(args=args, count=n) for args, n in sorted(counts.items(), key=lambda item: -item[1])]


def build_problem(product: MatrixProduct, calls: int) -> GemmProblem | None:
    """The problem that PyTorch gives to hipBLASLt for a product; None for a type that it does not have.

    BLAS counts by columns: PyTorch's m x n result by rows is an n x m result by columns, with the operands swapped.
    """
    names = {"float32": "f32_r", "bfloat16": "bf16_r", "float16": "f16_r"}
    kind = names.get(product.dtype)
    if kind is None or "S" in product.order_a + product.order_b:
        return None
    m, n, k = product.n, product.m, product.k
    trans_a, trans_b = product.order_b, product.order_a
    sizes = {"-m": m, "-n": n, "-k": k, "--lda": k if trans_a == "T" else m, "--ldb": n if trans_b == "T" else k}
    sizes |= {"--ldc": m, "--ldd": m, "--batch_count": product.batch}
    if product.batch > 1:
        sizes |= {"--stride_a": m * k, "--stride_b": n * k, "--stride_c": m * n, "--stride_d": m * n}
    out = names.get(product.out_dtype, kind)
    words = {name: str(size) for name, size in sizes.items()}
    words |= {"--alpha": "1", "--beta": "1" if "add" in product.operator else "0"}
    words |= {"--transA": trans_a, "--transB": trans_b, "--a_type": kind, "--b_type": kind, "--c_type": out}
    words |= {"--d_type": out, "--scale_type": "f32_r", "--compute_type": "f32_r"}
    return GemmProblem(args=tuple(word for pair in words.items() for word in pair), count=calls)


def parse_tuning_file(text: str, place: str) -> TuningFile:
    """Read a tuning file: the version unless solutions have names, then a header and a line for each problem.

    Raises:
        PrimusError: It is cut off or not a tuning file.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    version = lines[0].removeprefix(VERSION).strip() if lines and lines[0].startswith(VERSION) else ""
    if not version and not (lines and set(NAMES) & set(lines[0].split(","))):
        raise PrimusError(f"{place}: not a tuning file: the first line is not '{VERSION}'")
    entries = []
    rest = lines[1:] if version else lines
    for header, line in zip(rest[::2], rest[1::2], strict=False):
        names, values = header.split(","), line.split(",")
        if len(names) != len(values) or "transA" not in names:
            raise PrimusError(f"{place}: damaged: {len(values)} values under {len(names)} columns: {line[:60]}")
        named = {ALIASES.get(name, name): value for name, value in zip(names, values, strict=True)}
        entries.append(TunedProblem(header=header, line=line, values=named))
    if not entries or len(rest) % 2:
        raise PrimusError(f"{place}: damaged: it ends without the values of a problem")
    return TuningFile(version=version, entries=entries)


def format_tuning_file(version: str, entries: Sequence[TunedProblem]) -> str:
    """The text of a tuning file."""
    first = [f"{VERSION} {version}\n"] if version else []
    return "".join([*first, *(f"    {entry.header}\n    {entry.line}\n" for entry in entries)])


def build_bench_command(program: str, problem: GemmProblem, options: Mapping[str, str]) -> list[str]:
    """The command that tries all solutions of a problem."""
    chosen = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [program, *problem.args, "--requested_solution", "-1", *chosen, "--print_kernel_info"]


def parse_log_line(line: str) -> tuple[str, ...] | None:
    """The options of a log line without the chosen solution; None for other lines."""
    _, found, rest = line.partition(PROGRAM)
    if not found:
        return None
    args: list[str] = []
    skips = False
    for word in rest.split():
        if skips and not word.startswith("--"):
            continue
        skips = word in CHOSEN
        if not skips:
            args.append(word)
    return tuple(args) if {"-m", "-n", "-k"} <= set(args) else None
