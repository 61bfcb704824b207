"""Write what is known of torchtitan's configuration tree, from a checkout that has its tags.

    python tools/torchtitan_fields.py TORCHTITAN_CHECKOUT

Facts are names and defaults of `torchtitan/config/job_config.py` of v0.2.2, which Primus 26.5 pins, and where the field
is in 0.3 (`frameworks/torchtitan/fields.yaml`). The effects of fields without an equivalent key are stated here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from megatron_arguments import make_plain, write_lines

TARGET = Path(__file__).parent.parent / "src/primus/frameworks/torchtitan"
TAG = "v0.2.2"
MOVED_SECTIONS = {"profiling": "profiler", "validation": "validator"}
MOVED = {
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "model.hf_assets_path": "hf_assets_path",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
}
GONE = {
    "optimizer.early_step_in_backward": "torchtitan 0.3 has no optimizer step in the backward pass",
    "parallelism.context_parallel_rotate_method": "torchtitan 0.3 chooses how keys and values rotate",
    "parallelism.disable_loss_parallel": "torchtitan 0.3 always computes the loss in parallel",
    "parallelism.expert_tensor_parallel_degree": "torchtitan 0.3 shards experts by expert parallelism only",
    "memory_estimation.enable": "torchtitan 0.3 has no memory estimation",
    "fault_tolerance.enable": "torchtitan 0.3 keeps TorchFT among its experiments",
    "experimental.custom_import": "torchtitan 0.3 has `override.imports` instead",
}
PRIMUS_KEYS: dict[str, Any] = {
    "training.mock_data": False,
    "primus_turbo.enable_primus_turbo": False,
    "primus_turbo.enable_attention_float8": False,
    "primus_turbo.enable_embedding_autocast": True,
    "primus_turbo.use_classic_attention": False,
    "primus_turbo.use_moe_fp8": True,
    "primus_turbo.use_turbo_async_tp": False,
    "primus_turbo.use_turbo_attention": False,
    "primus_turbo.use_turbo_float8_linear": False,
    "primus_turbo.use_turbo_grouped_mm": False,
    "primus_turbo.use_turbo_mx_linear": False,
    "file_sink_level": "DEBUG",
    "sink_level": None,
    "stderr_sink_level": "INFO",
    "trainable": False,
}
"""Primus' extensions (primus/backends/torchtitan/primus_turbo_extensions/config_extension.py) and their defaults."""
EFFECTS = {
    "report": """
        job.* metrics.* profiling.*
        comm.trace_buf_size comm.save_traces_* memory_estimation.disable_fake_mode sink_level
        file_sink_level stderr_sink_level trainable model.print_after_conversion validation.*
        debug.print_config debug.save_config_file debug.enable_structured_logging
    """,
    "speed": """
        primus_turbo.* training.gc_* training.enable_cpu_offload training.disable_cuda_graphs training.dataloader.*
        optimizer.implementation
        activation_checkpoint.* compile.* parallelism.* quantize.*
    """,
    "launch": "comm.* fault_tolerance.* memory_estimation.*",
    "checkpoint": "checkpoint.*",
    "numbers": """
        primus_turbo.enable_attention_float8 optimizer.* lr_scheduler.* training.* debug.* experimental.* model.*
    """,
}


def main() -> None:
    checkout = sys.argv[1]
    source = subprocess.run(
        ["git", "-C", checkout, "show", f"{TAG}:torchtitan/config/job_config.py"], check=True, capture_output=True
    ).stdout
    newer = yaml.safe_load((TARGET / "fields.yaml").read_text())
    keys: dict[str, dict[str, Any]] = {}
    for name, default in [*list_fields(import_source(source)), *PRIMUS_KEYS.items()]:
        found: dict[str, Any] = {"default": make_plain(default), "effect": find_effect(name)}
        moved = MOVED.get(name, move_section(name))
        if moved in newer and moved != name:
            found["now"] = moved
        elif moved not in newer:
            found["gone"] = GONE.get(name, "torchtitan 0.3 has no such field")
        keys[name] = found
    for name in newer.keys() - keys.keys():
        if name.partition(".")[0] in ("activation_checkpoint", "compile", "debug", "parallelism", "training"):
            keys[name] = {"effect": find_effect(name)}  # fields that 0.3 adds; primus does the work of other sections
    write_lines(TARGET / "known_keys.json", {"versions": ["0.2", "0.3"]}, dict(sorted(keys.items())))


def import_source(source: bytes) -> Any:
    """The module in `source`, which imports nothing of torchtitan."""
    with tempfile.NamedTemporaryFile(suffix=".py") as file:
        file.write(source)
        file.flush()
        spec = importlib.util.spec_from_file_location("job_config", file.name)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["job_config"] = module
        spec.loader.exec_module(module)
    return module.JobConfig


def list_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and default of each field."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from list_fields(hints[field.name], f"{prefix}{field.name}.")
        elif field.default_factory is not dataclasses.MISSING:
            yield prefix + field.name, field.default_factory()
        else:
            yield prefix + field.name, field.default


def move_section(name: str) -> str:
    """`name` in the section that 0.3 has in place of the one of 0.2."""
    section, dot, field = name.partition(".")
    return MOVED_SECTIONS.get(section, section) + dot + field


def find_effect(name: str) -> str:
    """The effect of the longest pattern that matches `name`."""
    patterns = [
        (len(pattern), effect)
        for effect, all_of in EFFECTS.items()
        for pattern in all_of.split()
        if fnmatchcase(name, pattern)
    ]
    return max(patterns)[1]


if __name__ == "__main__":
    main()
