"""The model card (README.md) of an exported checkpoint: what it is, what it was trained on, how to generate text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from primus.redaction import redact
from primus.runs.store import Run

if TYPE_CHECKING:
    from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint
    from primus.config.schema import Trainer
    from primus.data.hub_files import HubFiles

HUB = "hf:"
PROMPT = "The capital of France is"
CHAT = """messages = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
TEXT = f'inputs = tokenizer("{PROMPT}", return_tensors="pt")'


class CheckpointOrigin(NamedTuple):
    """What is known of where a checkpoint comes from."""

    found: FoundCheckpoint
    run: Run | None
    trainer: Trainer | None
    """Settings of the run, where they can be read."""
    base: FoundCheckpoint | None
    """The weights that the run began from, or that an adapter belongs to, if they are on this machine."""


def format_model_card(opened: OpenedCheckpoint, origin: CheckpointOrigin, files: HubFiles) -> str:
    """The card of a checkpoint; local paths are cut to their last part.

    Args:
        opened: The checkpoint.
        origin: Its run.
        files: Its tokenizer.
    """
    from primus.data.instruction.chat_template import read_chat_template

    has_template = read_chat_template(files.get, "") is not None
    name = origin.run.directory.parent.name if origin.run else opened.found.folder.name
    facts = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["primus"]}
    base = _find_hub_base(origin)
    if base:
        facts["base_model"] = base
    rows = [*_list_model(opened), *(_list_training(opened, origin.trainer) if origin.trainer else ())]
    return redact(
        "\n".join(
            [
                "---",
                *(f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in facts.items()),
                "---",
                f"# {name}",
                "",
                "| | |",
                "|---|---|",
                *(f"| {key} | {value} |" for key, value in rows),
                "",
                "```python",
                "from transformers import AutoModelForCausalLM, AutoTokenizer",
                "",
                'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
                'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
                CHAT if has_template else TEXT,
                "output = model.generate(**inputs, max_new_tokens=64)",
                'print(tokenizer.decode(output[0][inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
                "```",
                "",
            ]
        )
    )


def _find_hub_base(origin: CheckpointOrigin) -> str:
    """The model of the hub that training began from, as the hub names it; empty for others."""
    load = origin.trainer.checkpoint.load if origin.trainer else None
    if not load or not load.startswith(HUB) or os.path.exists(os.path.expanduser(load.removeprefix(HUB))):
        return ""
    return load.removeprefix(HUB).partition("@")[0]


def _list_model(opened: OpenedCheckpoint) -> Iterator[tuple[str, str]]:
    from primus.checkpoint.family import choose_family

    tensors = opened.weights.list_tensors().values()
    parameters = sum(info.num_bytes // info.dtype.itemsize for info in tensors)
    yield "architecture", choose_family(opened.spec)[1].architecture
    yield "parameters", f"{parameters:,}"
    yield "longest text", f"{opened.spec.max_position_embeddings:,} tokens"


def _list_training(opened: OpenedCheckpoint, trainer: Trainer) -> Iterator[tuple[str, str]]:
    from primus.checkpoint.manifest import read_manifest

    data, training = trainer.data, trainer.training
    is_adapter = opened.found.format == "peft"
    tuned = "fine-tuned, adapters merged into the weights" if is_adapter else "fine-tuned"
    yield "trained by", f"primus, framework {trainer.framework}"
    yield "stage", tuned if data.sft_data_path else "pre-trained"
    if trainer.checkpoint.load:
        yield "began from", _shorten(trainer.checkpoint.load)
    source = data.sft_data_path or data.dataset or data.train_data_path
    if source:
        parts = source if isinstance(source, list) else [source]
        yield "data", ", ".join(_shorten(str(part)) for part in parts)
    saved = read_manifest(opened.found.folder.parent if is_adapter else opened.found.folder)
    if opened.step is not None:
        yield "steps", f"{opened.step:,}"
    if saved is not None and saved.consumed_samples is not None:
        yield "tokens", f"{saved.consumed_samples * training.seq_length:,}"


def _shorten(path: str) -> str:
    """The last part of a local path; what only the hub or a number can be stays."""
    local = path.removeprefix(HUB)
    is_local = os.path.isabs(local) or local.startswith((".", "~")) or os.path.exists(local)
    return os.path.basename(local.rstrip("/")) if is_local else local
