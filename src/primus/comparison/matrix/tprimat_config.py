"""The config.env of tprimat as a matrix: the same file for both platforms, Llama 3.1 8B and Qwen 2.5 7B.

Keys and defaults are those of config.env, train/*.sh and train_*.py of github.com/DmitriiNikolaevAtAmd/tprimat.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from primus.comparison.matrix.matrix import LoadedMatrix, MatrixModel, MatrixPlatform, RivalMatrix
from primus.errors import UsageError, did_you_mean

DEFAULTS = {
    "DATA_DIR": "/data/tprimat", "OUTPUT_DIR": "./output", "DATASET": "bc", "SEED": "42", "MBS": "1", "SL": "2048",
    "LR": "3.0e-4", "WEIGHT_DECAY": "0.1", "BETA1": "0.9", "BETA2": "0.95", "WARMUP_STEPS": "50", "TRAIN_ITERS": "500",
    "PRECISION": "bf16", "TP": "1", "PP": "1", "DP": "8", "GA": "8", "PROFILING": "false", "FRAMEWORK": "all",
    "FP8_HYBRID": "false", "PROFILE_STEP_START": "1", "PROFILE_STEP_END": "5",
}  # fmt: skip
NO_EFFECT = {
    "DATA_SAMPLES": "data prepare --num-samples",
    "TRAIN_SPLIT": "split: 100,0,0 is set, as in tprimat's training scripts",
    "HF_DATASETS_CACHE": "data prepare",
    "VERIFY_DATA": "data verify",
    "VERIFY_SAMPLES": "data verify --samples",
    "VERIFY_FULL_SCAN": "data verify --full",
    "FP8_PARAM": "primus keeps float32 masters",
    "PARALLEL": "TP, PP and DP set the layout",
    "PRIMUS_PATH": "primus is this package",
    "PROFILE_WAIT": "PROFILE_STEP_START and PROFILE_STEP_END choose the steps",
    "PROFILE_WARMUP": "PROFILE_STEP_START and PROFILE_STEP_END choose the steps",
    "PROFILE_ACTIVE": "PROFILE_STEP_START and PROFILE_STEP_END choose the steps",
    "PROFILE_REPEAT": "PROFILE_STEP_START and PROFILE_STEP_END choose the steps",
}
"""Keys that change nothing in a comparison, and what does it instead."""
OTHER_KEYS = ("GBS", "SEQ_LEN", "HF_HOME", "HF_TOKEN", "PROFILING")
MODELS = {"llama": ("llama3.1_8B", "meta-llama/Llama-3.1-8B"), "qwen": ("qwen2.5_7B", "Qwen/Qwen2.5-7B")}
"""Preset and tokenizer of each model."""
FRAMEWORKS = {"all": ["mega", "prim", "nemo"]}
PLATFORM_NOTES = {
    "prim": "prim is native, the trainer of primus, on every platform; tprimat trains nemo instead on NVIDIA",
    "nemo": "nemo is megatron-bridge, which NeMo trains LLMs by, on every platform; tprimat trains prim instead on AMD",
}
"""What a framework of tprimat is here, where it is another one on one platform there."""
ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")
EXPERIMENT = Path(__file__).with_name("tprimat.yaml")
"""The fair settings of both sides that config.env does not name."""


def read_tprimat_matrix(file: Path, environ: Mapping[str, str]) -> LoadedMatrix:
    """The matrix of a config.env; variables of the environment replace its values, as in `FRAMEWORK=mega run_train.sh`.

    Raises:
        UsageError: The file does not exist, or a value is wrong.
    """
    written = _read_assignments(file, environ)
    unknown = [key for key in written if key not in {*DEFAULTS, *NO_EFFECT, *OTHER_KEYS}]
    if unknown:
        known = [*DEFAULTS, *NO_EFFECT, *OTHER_KEYS]
        raise UsageError(f"{file}: unknown key '{unknown[0]}'", did_you_mean(unknown[0], known))
    shell = {key: environ[key] for key in ("FRAMEWORK", "DATASET", "PROFILING", "TRAIN_ITERS") if environ.get(key)}
    values = {**DEFAULTS, **written, **shell}
    if "SEQ_LEN" in written and "SL" not in written:
        values["SL"] = written["SEQ_LEN"]
    notes = [f"{file}: {key} has no effect here: {NO_EFFECT[key]}" for key in written if key in NO_EFFECT]
    if "HF_TOKEN" in written:
        raise UsageError(f"{file}: HF_TOKEN is a secret", "set it in the environment: export HF_TOKEN=...")
    sizes = {
        key: _parse_integer(values[key], key, file) for key in ("MBS", "SL", "TP", "PP", "DP", "GA", "TRAIN_ITERS")
    }
    accumulated = sizes["MBS"] * sizes["DP"] * sizes["GA"]
    batch = _parse_integer(values["GBS"], "GBS", file) if "GBS" in values else accumulated
    if "GA" in written and batch != accumulated:
        raise UsageError(f"{file}: GBS={batch}, and MBS * DP * GA = {accumulated}", "remove GA or GBS")
    platform = MatrixPlatform(processes=sizes["TP"] * sizes["PP"] * sizes["DP"])
    settings = _list_settings(values, sizes, batch, file)
    if values["FP8_HYBRID"].lower() == "true" and values["PRECISION"] != "fp8":
        notes.append(f"{file}: FP8_HYBRID applies in tprimat to NVIDIA alone: not applied, both sides train in bf16")
    frameworks = FRAMEWORKS.get(values["FRAMEWORK"], [values["FRAMEWORK"]])
    notes += [PLATFORM_NOTES[name] for name in frameworks if name in PLATFORM_NOTES]
    matrix = RivalMatrix(
        name="tprimat",
        experiment=str(EXPERIMENT),
        output=f"{values['OUTPUT_DIR'].rstrip('/')}/tprimat",
        platforms={"amd": platform, "nvidia": platform},
        frameworks=frameworks,
        models={name: _describe_model(name, values) for name in MODELS},
        settings=settings,
        env={"HF_HOME": written["HF_HOME"]} if "HF_HOME" in written else {},
        repetitions=3,
    )
    return LoadedMatrix(matrix=matrix, file=file, notes=tuple(notes), draws_report=True)


def _list_settings(values: Mapping[str, str], sizes: Mapping[str, int], batch: int, file: Path) -> dict[str, object]:
    """The settings of both sides."""
    if values["PRECISION"] not in ("bf16", "fp32", "fp8"):
        raise UsageError(f"{file}: PRECISION={values['PRECISION']}", "use bf16, fp32 or fp8")
    profiles = values["PROFILING"].lower() in ("true", "1")
    if not profiles and values["PROFILING"].lower() not in ("false", "0", ""):
        raise UsageError(f"{file}: PROFILING={values['PROFILING']}", "use true or false")
    window = f"steps={values['PROFILE_STEP_START']}:{values['PROFILE_STEP_END']}"
    return {
        "seed": _parse_integer(values["SEED"], "SEED", file),
        "micro_batch_size": sizes["MBS"],
        "global_batch_size": batch,
        "seq_length": sizes["SL"],
        "train_iters": sizes["TRAIN_ITERS"],
        "lr": _parse_number(values["LR"], "LR", file),
        "lr_warmup_iters": _parse_integer(values["WARMUP_STEPS"], "WARMUP_STEPS", file),
        "weight_decay": _parse_number(values["WEIGHT_DECAY"], "WEIGHT_DECAY", file),
        "adam_beta1": _parse_number(values["BETA1"], "BETA1", file),
        "adam_beta2": _parse_number(values["BETA2"], "BETA2", file),
        "bf16": values["PRECISION"] != "fp32",
        "tensor_model_parallel_size": sizes["TP"],
        "pipeline_model_parallel_size": sizes["PP"],
        **({"fp8": "hybrid"} if values["PRECISION"] == "fp8" else {}),
        **({"profile": window} if profiles else {}),
    }


def _describe_model(name: str, values: Mapping[str, str]) -> MatrixModel:
    """A model with its data and tokenizer; Qwen has its own data, since its token ids differ from those of Llama."""
    preset, tokenizer = MODELS[name]
    prefix = f"{values['DATA_DIR']}/{values['DATASET']}-train" + ("" if name == "llama" else f"-{name}")
    return MatrixModel(preset=preset, settings={"train_data_path": prefix, "tokenizer_model": tokenizer})


def _read_assignments(file: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """NAME=VALUE lines as a shell reads them: comments, quotes, export, and ${NAME} of the lines before or of the
    environment."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = ASSIGNMENT.fullmatch(line)
        try:
            words = shlex.split(match[2], comments=True) if match else []
        except ValueError as error:
            raise UsageError(f"{file}:{number}: {str(error).lower()}", "close the quotes") from None
        if match is None or len(words) > 1:
            raise UsageError(f"{file}:{number}: not an assignment: {line.strip()}", "write NAME=VALUE")
        found[match[1]] = _substitute(words[0] if words else "", {**environ, **found})
    return found


def _substitute(text: str, known: Mapping[str, str]) -> str:
    return re.sub(
        r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)", lambda match: known.get(match[1] or match[3], match[2] or ""), text
    )


def _parse_integer(text: str, key: str, file: Path) -> int:
    if not re.fullmatch(r"\d+", text):
        raise UsageError(f"{file}: {key}={text}: not a whole number")
    return int(text)


def _parse_number(text: str, key: str, file: Path) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise UsageError(f"{file}: {key}={text}: not a number")
