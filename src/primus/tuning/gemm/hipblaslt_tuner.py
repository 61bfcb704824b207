"""hipblaslt-bench as a tuner: it tries all solutions of hipBLASLt for a logged product."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError, UnfitError
from primus.machine.environment.hipblaslt import HIPBLASLT_VARIABLE, RUNTIME_CACHE, RUNTIME_TUNING
from primus.process import run_command
from primus.runs import tuned_files
from primus.runs.files import write_text
from primus.task import TaskContext
from primus.tuning.gemm import hipblaslt
from primus.tuning.gemm.gpu_tuner import TunedPart
from primus.tuning.gemm.hipblaslt import GemmProblem
from primus.tuning.gemm.options import GemmOptions
from primus.tuning.gemm.traced_products import trace_products

BENCH_OPTIONS = {"skip_slow_solution_ratio": "0.7", "rotating": "512", "cold_iters": "20", "iters": "20"}
"""The values of AMD-AGI/Primus, examples/offline_tune/offline_tune_gemm.py."""


class HipblasltTuner(Struct, frozen=True):
    """See `GpuTuner`."""

    options: GemmOptions
    context: TaskContext

    name = "hipBLASLt"
    kind = tuned_files.HIPBLASLT

    @property
    def output(self) -> Path:
        return Path(self.options.output or "./output/tune/hipblaslt.txt")

    def collect_problems(self) -> list[GemmProblem]:
        if self.options.config is not None:
            tuned_files.check_override_is_read(self.context.environ)
        if self.options.shapes:
            return hipblaslt.read_problems(map(Path, self.options.shapes))
        found = trace_products(self.options, self.context)
        problems = [hipblaslt.build_problem(each.product, each.calls) for each in found.products]
        return [problem for problem in problems if problem is not None]

    def tune_problem(self, problem: GemmProblem, gpu: str, folder: Path) -> str:
        result = folder / "result.txt"
        environ = {**self.context.environ, "HIPBLASLT_TUNING_FILE": str(result), "HIP_VISIBLE_DEVICES": gpu}
        # A file in force would be what is measured, and so would a cache.
        for name in (HIPBLASLT_VARIABLE, RUNTIME_TUNING, RUNTIME_CACHE):
            environ.pop(name, None)
        command = hipblaslt.build_bench_command(self.options.bench, problem, BENCH_OPTIONS)
        answer = run_command(command, environ, limit_s=self.options.timeout, ends_with_caller=True)
        if answer.state == "missing":
            raise UnfitError(answer.problem, "it is part of ROCm's hipblaslt packages; name another path by --bench")
        if answer.state != "ok":
            raise PrimusError(answer.problem)
        try:
            return result.read_text(encoding="utf-8")
        except OSError:
            raise PrimusError(f"{self.options.bench} wrote no tuning file") from None

    def parse_part(self, text: str, place: str) -> TunedPart:
        file = hipblaslt.parse_tuning_file(text, place)
        values = file.entries[-1].values
        return TunedPart(
            text=text, version=file.version, us=values.get("us", ""), solution=values.get("solution_index", "")
        )

    def write_output(self, parts: Sequence[TunedPart]) -> str:
        entries = [hipblaslt.parse_tuning_file(part.text, "").entries[-1] for part in parts]
        text = hipblaslt.format_tuning_file(parts[0].version, entries)
        write_text(self.output, text)
        return text

    def list_variables(self) -> dict[str, str]:
        return {HIPBLASLT_VARIABLE: str(self.output.resolve())}

    def describe_validity(self) -> dict[str, str]:
        return tuned_files.describe_rocm(self.context.facts())
