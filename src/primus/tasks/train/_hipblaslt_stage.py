"""$PRIMUS_HIPBLASLT_TUNING_STAGE: log the matrix products of a run, tune them, or train with the result.

The stages and their files are those of AMD-AGI/Primus (runner/helpers/hooks/train/pretrain/megatron):

    0    TransformerEngine tries solutions while it trains
    1    training logs its products to gemm_shape/
    2    hipblaslt-bench tunes them into gemm_tune/, and nothing is trained
    3    training uses gemm_tune/
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from primus import registry
from primus.errors import PrimusError, UsageError
from primus.machine.environment.hipblaslt import HIPBLASLT_VARIABLE
from primus.plan import LaunchJob, Variable
from primus.runs.files import write_text
from primus.runs.tuned_files import check_override_is_read
from primus.task import TASKS, TaskContext
from primus.tuning.gemm import hipblaslt

SWITCH = "PRIMUS_HIPBLASLT_TUNING"
STAGE = "PRIMUS_HIPBLASLT_TUNING_STAGE"
ONLINE, LOG, TUNE, USE = range(4)
ONLINE_VARIABLES = {"TE_HIPBLASLT_TUNING_RUN_COUNT": "10", "TE_HIPBLASLT_TUNING_ALGO_COUNT": "50"}
"""The values of AMD-AGI/Primus."""
LOG_MASK = "32"
"""Bench lines (hipBLASLt documentation, HIPBLASLT_LOG_MASK)."""


def find_stage(environ: Mapping[str, str]) -> int | None:
    """The stage that the environment asks for; None for none.

    Raises:
        UsageError: It is not a stage.
    """
    if environ.get(SWITCH, "1" if environ.get(STAGE) else "0").lower() in ("", "0", "false"):
        return None
    text = environ.get(STAGE) or "0"
    if text not in ("0", "1", "2", "3"):
        raise UsageError(
            f"${STAGE}={text}: stages are 0, 1, 2 and 3", "1 logs products, 2 tunes them, 3 uses the result"
        )
    return int(text)


def add_stage_variables(job: LaunchJob, stage: int, environ: Mapping[str, str]) -> LaunchJob:
    """The training job of a stage; changes nothing on disk.

    Raises:
        UsageError: Stage 3 has no tuned file, or hipBLASLt would not read it.
        PrimusError: The tuned file is damaged.
    """
    source = f"${STAGE}={stage}"
    values = dict(ONLINE_VARIABLES)
    notes: tuple[str, ...] = ()
    if stage == LOG:
        folder = find_folder(job.name, environ) / "gemm_shape"
        node = environ.get("NODE_RANK") or environ.get("SLURM_NODEID") or "0"
        # %i is the process id: processes of a node must not write into one file.
        log = folder.absolute() / f"dump_hipblaslt_gemm_shape_{node}_%i.txt"
        values = {"HIPBLASLT_LOG_MASK": LOG_MASK, "HIPBLASLT_LOG_FILE": str(log), HIPBLASLT_VARIABLE: ""}
        notes = (f"products are logged to {folder}",)
    elif stage == USE:
        check_override_is_read(environ)
        tuned, local = read_tuned_file(job.name, environ)
        values = {HIPBLASLT_VARIABLE: str(local)}
        notes = (f"{len(tuned.entries)} tuned products of hipBLASLt {tuned.version} are used",)
    variables = {name: Variable(value, source) for name, value in values.items()}
    return structs.replace(job, env={**variables, **job.env}, notes=(*job.notes, *notes))


def prepare_files(name: str, stage: int, context: TaskContext) -> None:
    """Create the folder of the logs, or copy the tuned file to the local disk.

    hipBLASLt opens the file for each new product, which halves the speed on a network file system
    (github.com/ROCm/rocm-libraries/issues/2905).
    """
    if stage == LOG:
        (find_folder(name, context.environ) / "gemm_shape").mkdir(parents=True, exist_ok=True)
    if stage == USE:
        tuned, local = read_tuned_file(name, context.environ)
        _check_architecture(tuned, context)
        write_text(local, find_tuned_path(name, context.environ).read_text(encoding="utf-8"))
        context.say(f"hipBLASLt: {len(tuned.entries)} tuned products of version {tuned.version}, copied to {local}")


def tune_products(name: str, context: TaskContext) -> None:
    """Stage 2: tune the logged products on node 0.

    Raises:
        UsageError: Nothing was logged.
    """
    if context.layout is not None and context.layout.node_rank:
        return
    folder = find_folder(name, context.environ) / "gemm_shape"
    logs = tuple(str(path) for path in sorted(folder.glob("dump_hipblaslt_gemm_shape_*")))
    if not logs:
        raise UsageError(f"{folder} has no logs of products", f"first train some steps with {STAGE}=1")
    task = registry.load_plug_in(TASKS, "tune gemm")
    output = str(find_tuned_path(name, context.environ))
    task.run(task.Options(shapes=logs, output=output), structs.replace(context, overrides=()))


def find_folder(name: str, environ: Mapping[str, str]) -> Path:
    """Folder of all stages for the model; AMD-AGI/Primus names it by $PRIMUS_MODEL."""
    return Path("output") / "tune_hipblaslt" / (environ.get("PRIMUS_MODEL") or name)


def find_tuned_path(name: str, environ: Mapping[str, str]) -> Path:
    """The file that stage 2 writes."""
    return find_folder(name, environ) / "gemm_tune" / "tune_hipblas_gemm_results.txt"


def read_tuned_file(name: str, environ: Mapping[str, str]) -> tuple[hipblaslt.TuningFile, Path]:
    """The tuned products, and where the local disk has them.

    Raises:
        UsageError: The file does not exist.
        PrimusError: It is damaged.
    """
    path = find_tuned_path(name, environ)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", f"tune the logged products first: {STAGE}=2") from None
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    local = Path(tempfile.gettempdir()) / f"primus-{os.getuid()}" / f"hipblaslt-{digest}.txt"
    return hipblaslt.parse_tuning_file(text, str(path)), local


def _check_architecture(tuned: hipblaslt.TuningFile, context: TaskContext) -> None:
    """Refuse a file for other GPUs, which hipBLASLt would ignore without a message."""
    own = {device.architecture for device in context.facts().devices if device.architecture}
    theirs = {entry.values["gcnArchName"].split(":")[0] for entry in tuned.entries if "gcnArchName" in entry.values}
    if own and theirs and not own & theirs:
        raise UsageError(
            f"the products are tuned for {', '.join(sorted(theirs))}, this machine has {', '.join(sorted(own))}",
            f"log and tune them here: {STAGE}=1, then 2",
        )
