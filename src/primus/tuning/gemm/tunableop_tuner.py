"""TunableOp as a tuner: PyTorch tries the solutions of rocBLAS and hipBLASLt for a recorded product."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from primus import interpreter
from primus.errors import PrimusError, UnfitError
from primus.process import run_command
from primus.runs import tuned_files
from primus.runs.files import write_text
from primus.site_folders import find_distribution
from primus.task import TaskContext
from primus.tuning.gemm import tunableop
from primus.tuning.gemm.gpu_tuner import TunedPart
from primus.tuning.gemm.options import GemmOptions
from primus.tuning.gemm.product_logs import read_product_logs
from primus.tuning.gemm.traced_products import trace_products
from primus.tuning.gemm.tunableop import TunableProblem, TunableResults, TunableSolution
from primus.tuning.search.training import TrialTraining, run_training

WORKER = "primus.tuning.gemm.tunableop_worker"
RECORDED_STEPS = 3


class TunableOpTuner(Struct, frozen=True):
    """See `GpuTuner`."""

    options: GemmOptions
    context: TaskContext

    name = "TunableOp"
    kind = tuned_files.TUNABLEOP

    @property
    def output(self) -> Path:
        return Path(self.options.output or "./output/tune/tunableop.csv")

    def collect_problems(self) -> list[TunableProblem]:
        """Those of records as PyTorch wrote them; other logs and a step on fake tensors name products."""
        files = [Path(shape) for shape in self.options.shapes]
        if files and all(is_record(file) for file in files):
            return tunableop.read_tunable_problems(files)
        if not files and self.options.record:
            return tunableop.read_tunable_problems(self._record_products())
        found = read_product_logs(files) if files else trace_products(self.options, self.context)
        built = [tunableop.build_tunable_problem(each.product, each.calls) for each in found.products]
        problems = [problem for problem in built if problem is not None]
        if not problems:
            raise PrimusError(
                f"TunableOp has no operator for the {len(built)} products of {found.source}",
                "record them by PyTorch itself: --record",
            )
        return problems

    def _record_products(self) -> list[Path]:
        """The records of a short real run, one for each GPU."""
        folder = self.output.parent / f"{self.output.stem}-record"
        for old in folder.glob("untuned*.csv"):
            old.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        values = {**tuned_files.TUNABLEOP_SETTINGS, "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "1"}
        values |= {tuned_files.TUNABLEOP_VARIABLE: str((folder / "none.csv").resolve())}
        values |= {"PYTORCH_TUNABLEOP_UNTUNED_FILENAME": str((folder / "untuned.csv").resolve())}
        answer, run = run_training(
            TrialTraining(
                config=str(self.options.config),
                settings={"train_iters": str(RECORDED_STEPS)},
                workspace=folder,
                limit_s=self.options.timeout,
                options=("--no-tuned", *(word for each in values.items() for word in ("--env", "=".join(each)))),
            ),
            self.context,
        )
        files = sorted(folder.glob("untuned*.csv"))
        if not files:
            where = f"see runs show {run.directory}" if run else "PyTorch for ROCm records them"
            raise PrimusError(f"the run recorded no products for TunableOp: {answer.problem or 'no file'}", where)
        return files

    def tune_problem(self, problem: TunableProblem, gpu: str, folder: Path) -> str:
        file = folder / "untuned.csv"
        file.write_text(f"{problem.line}\n", encoding="utf-8")
        environ = {
            **self.context.environ,
            **tuned_files.TUNABLEOP_SETTINGS,
            "PYTORCH_TUNABLEOP_TUNING": "1",
            # Results that exist would not be tuned again.
            tuned_files.TUNABLEOP_VARIABLE: str(folder / "results.csv"),
            "HIP_VISIBLE_DEVICES": gpu,
        }
        command = interpreter.build_module_command(sys.executable, WORKER, str(file))
        answer = run_command(command, environ, limit_s=self.options.timeout, ends_with_caller=True)
        if answer.state != "ok":
            raise PrimusError(answer.problem)
        found = json.loads(answer.text.strip().rpartition("\n")[2])
        if "unfit" in found:
            raise UnfitError(found["unfit"], "use an image of ROCm, or install PyTorch for ROCm")
        solutions = [
            TunableSolution(signature=name, parameters=sizes, solution=solution, time_ms=f"{time_ms:g}")
            for name, sizes, solution, time_ms in found["results"]
        ]
        return tunableop.format_results(TunableResults(validators=dict(found["validators"]), solutions=solutions))

    def parse_part(self, text: str, place: str) -> TunedPart:
        results = tunableop.parse_results(text, place)
        last = results.solutions[-1]
        time_us = f"{float(last.time_ms) * 1e3:.1f}" if last.time_ms else ""
        version = tunableop.format_validators(results.validators)
        return TunedPart(text=text, version=version, us=time_us, solution=last.solution)

    def write_output(self, parts: Sequence[TunedPart]) -> str:
        merged = tunableop.merge_results([tunableop.parse_results(part.text, "") for part in parts])
        text = tunableop.format_results(merged)
        write_text(self.output, text)
        for copy in tuned_files.list_device_copies(self.output, len(self.context.facts().devices)):
            write_text(copy, text)
        return text

    def list_variables(self) -> dict[str, str]:
        return {**tuned_files.TUNABLEOP_SETTINGS, tuned_files.TUNABLEOP_VARIABLE: str(self.output.resolve())}

    def describe_validity(self) -> dict[str, str]:
        return tuned_files.describe_rocm(self.context.facts(), find_distribution("torch", sys.path))


def is_record(file: Path) -> bool:
    """Whether TunableOp wrote the file.

    Raises:
        PrimusError: It cannot be read.
    """
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return tunableop.is_tunableop_record(opened.readline())
    except OSError as error:
        raise PrimusError(f"{file}: cannot be read: {error.strerror}") from None
