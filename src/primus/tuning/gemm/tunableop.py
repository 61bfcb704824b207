"""TunableOp's files: matrix products that PyTorch recorded to be tuned, and the solutions that it found.

Newer versions of PyTorch write leading dimensions (``tn_512_256_64_ld_64_64_512``), older ones do not.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError
from primus.tuning.gemm.products import MatrixProduct

TYPES = {"float32": "float", "float64": "double", "bfloat16": "BFloat16", "float16": "Half"}
"""Type names of C10 (torch/cuda/tunable.py, _process_single_offline_gemm)."""
PREFIXES = ("Gemm", "ScaledGemm")
"""Lines of other operators are not tuned (torch/cuda/tunable.py, tune_gemm_in_file)."""
PARAMETERS = re.compile(r"([nt])([nt])_(\d+)_(\d+)_(\d+)(_B_\d+)?(_ld_\d+_\d+_\d+)?(_rw_\w+)?")
TIME = re.compile(r"([\d.]+(e[-+]?\d+)?)?")
"""Milliseconds; the field is optional."""
VALIDATOR = "Validator"
VERSION_VALIDATOR = "PT_VERSION"
"""Validator that each file has (ATen/cuda/tunable/Tunable.h, mandatory_keys)."""
UNCHANGED = "Default"
"""Solution for a product that PyTorch computes as it does without TunableOp."""


class TunableProblem(Struct, frozen=True, kw_only=True):
    """A matrix product of a record."""

    signature: str
    """Operator, type and transposes: ``GemmTunableOp_BFloat16_TN``."""
    parameters: str
    """Transposes, sizes by columns and leading dimensions."""
    count: int
    """Times that it is in the records."""

    @property
    def line(self) -> str:
        """The line of a record, as PyTorch reads it."""
        return f"{self.signature},{self.parameters}"

    @property
    def key(self) -> str:
        """Names the problem in files."""
        return hashlib.sha256(self.line.encode()).hexdigest()[:16]

    @property
    def shape(self) -> str:
        """`m x n x k` with transposes."""
        found = PARAMETERS.match(self.parameters)
        sizes = f"{found[3]} x {found[4]} x {found[5]} {(found[1] + found[2]).upper()}" if found else self.parameters
        return f"{sizes} {self.signature.split('_')[1]}"


class TunableSolution(Struct, frozen=True, kw_only=True):
    """The solution that PyTorch takes for a product."""

    signature: str
    parameters: str
    solution: str
    """``Gemm_Hipblaslt_1219``, or `UNCHANGED`."""
    time_ms: str = ""


class TunableResults(Struct, frozen=True, kw_only=True):
    """A file of results; another value of a validator makes PyTorch reject it."""

    validators: dict[str, str]
    solutions: list[TunableSolution]


def is_tunableop_record(text: str) -> bool:
    """Whether `text` begins like a record or a file of results."""
    return text.startswith((*PREFIXES, f"{VALIDATOR},"))


def read_tunable_problems(files: Iterable[Path]) -> list[TunableProblem]:
    """The distinct problems of records of PYTORCH_TUNABLEOP_RECORD_UNTUNED, or of results that are to be tuned again.

    Raises:
        PrimusError: A file cannot be read, or no file has a problem.
    """
    read = list(files)
    counts: Counter[tuple[str, str]] = Counter()
    for file in read:
        try:
            counts.update(_parse_problems(file.read_text(encoding="utf-8", errors="replace")))
        except OSError as error:
            raise PrimusError(f"{file}: cannot be read: {error.strerror}") from None
    if not counts:
        raise PrimusError(
            f"no line of TunableOp in {', '.join(map(str, read))}",
            "record a few steps: --env PYTORCH_TUNABLEOP_ENABLED=1 --env PYTORCH_TUNABLEOP_TUNING=0 --env "
            "PYTORCH_TUNABLEOP_RECORD_UNTUNED=1",
        )
    return [TunableProblem(signature=name, parameters=sizes, count=n) for (name, sizes), n in counts.most_common()]


def build_tunable_problem(product: MatrixProduct, calls: int) -> TunableProblem | None:
    """The problem that PyTorch gives to TunableOp for a product; None for a type or an order that it does not tune.

    BLAS counts by columns: PyTorch's m x n result by rows is an n x m result by columns, with the operands swapped.
    """
    kind = TYPES.get(product.dtype)
    if kind is None or product.out_dtype or "S" in product.order_a + product.order_b:
        return None
    transposes = (product.order_b + product.order_a).lower()
    sizes = f"{transposes}_{product.n}_{product.m}_{product.k}"
    name = "GemmAndBiasTunableOp" if product.operator == "addmm" else "GemmTunableOp"
    if "bmm" in product.operator:
        name, sizes = "GemmStridedBatchedTunableOp", f"{sizes}_B_{product.batch}"
    parameters = _add_leading_dimensions(sizes)
    return TunableProblem(signature=f"{name}_{kind}_{transposes.upper()}", parameters=parameters, count=calls)


def parse_results(text: str, place: str) -> TunableResults:
    """Read a file of results.

    Raises:
        PrimusError: It is cut off, edited into something else, or has no validators or no solutions.
    """
    validators: dict[str, str] = {}
    solutions: dict[tuple[str, str], TunableSolution] = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition(",")
        if name == VALIDATOR:
            key, _, value = rest.partition(",")
            validators[key] = value
        elif name.startswith(PREFIXES):
            fields = rest.split(",", 3)
            time_ms = fields[2] if len(fields) > 2 else ""
            if len(fields) < 2 or not (PARAMETERS.fullmatch(fields[0]) and fields[1] and TIME.fullmatch(time_ms)):
                raise PrimusError(f"{place}: damaged: not a solution of TunableOp: {line[:80]}")
            solution = TunableSolution(signature=name, parameters=fields[0], solution=fields[1], time_ms=time_ms)
            solutions[name, fields[0]] = solution
    if VERSION_VALIDATOR not in validators:
        raise PrimusError(f"{place}: not a file of TunableOp's results: no line '{VALIDATOR},{VERSION_VALIDATOR},...'")
    if not solutions or not text.endswith("\n"):
        raise PrimusError(f"{place}: damaged: it ends without {'a complete line' if solutions else 'a solution'}")
    return TunableResults(validators=validators, solutions=list(solutions.values()))


def format_results(results: TunableResults) -> str:
    """The text of a file of results; PyTorch compares validators character by character."""
    lines = [f"{VALIDATOR},{name},{value}" for name, value in results.validators.items()]
    for each in results.solutions:
        time_ms = f",{each.time_ms}" if each.time_ms else ""
        lines.append(f"{each.signature},{each.parameters},{each.solution}{time_ms}")
    return "".join(f"{line}\n" for line in lines)


def merge_results(parts: Sequence[TunableResults]) -> TunableResults:
    """One file of results from those of single products, which have the same validators."""
    merged = {(each.signature, each.parameters): each for part in parts for each in part.solutions}
    return TunableResults(validators=parts[0].validators, solutions=[merged[key] for key in sorted(merged)])


def format_validators(validators: dict[str, str]) -> str:
    """All validators in a line: results with the same ones may be merged."""
    return ", ".join(f"{name} {validators[name]}" for name in sorted(validators))


def _parse_problems(text: str) -> Iterable[tuple[str, str]]:
    """The products of a record; the last line of a process that was killed may be cut off, and is not one."""
    for line in text.splitlines(keepends=True):
        if line.startswith(PREFIXES) and line.endswith("\n"):
            name, _, rest = line.strip().partition(",")
            parameters = rest.partition(",")[0]
            if PARAMETERS.fullmatch(parameters):
                yield name, _add_leading_dimensions(parameters)


def _add_leading_dimensions(parameters: str) -> str:
    """Parameters of an older version with the leading dimensions of contiguous matrices; newer ones unchanged."""
    found = PARAMETERS.fullmatch(parameters)
    if found is None or found[7] or found[8]:
        return parameters
    m, n, k = found.group(3, 4, 5)
    return f"{parameters}_ld_{k if found[1] == 't' else m}_{n if found[2] == 't' else k}_{m}"
