"""Read a configuration of Axolotl (SFT, LoRA, DPO) as an experiment of native."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus.config.imports.fine_tuning import MATRICES, PREFERENCES, FineTuningFile
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.foreign_file import ForeignFile

FORMATS = "a YAML file of Axolotl"
TELLING = ("base_model", "datasets")
REFUSED = {"grpo": "reinforcement learning", "kto": "KTO", "gdpo": "reinforcement learning"}
FORMS = ("alpaca", "chat_template", "sharegpt", "chat_template.default", "chatml.intel", "llama3.intel", "chatml.ultra")
"""Types of data whose rows are read here by their columns."""
COLUMN_DEFAULTS = {"field_messages": ("messages", "conversations"), "train_on_eos": ("turn",)}
MAPPINGS = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
FILES = (".jsonl", ".json", ".parquet")


def read_file(file: ForeignFile) -> ForeignConfig | None:
    """The experiment of a configuration; None if the file is another one.

    Raises:
        UsageError: It trains by reinforcement learning or KTO.
    """
    values = file.values
    if file.suffix not in (".yaml", ".yml") or not all(key in values for key in TELLING):
        return None
    FineTuningFile.check_kind(values, "rl", REFUSED, file.shown)
    target = ForeignConfig(origin=f"Axolotl configuration {file.shown}", name=file.name, framework="native")
    source = FineTuningFile(values, target)
    source.set_model("base_model")
    _read_data(source)
    source.set_batch("micro_batch_size", 1)
    source.set_shared("cosine", "num_epochs")
    if (ratio := source.take("cosine_min_lr_ratio")) is not None:
        source.set(min_lr_ratio=float(ratio))
    if (kind := source.take("adapter")) in ("lora", "qlora"):
        names = source.take("lora_target_modules") or ()
        is_all = bool(source.take("lora_target_linear", False)) or names == "all-linear"
        every = set().union(*MATRICES.values())
        source.set_adapter(kind, source.take("lora_alpha"), every if is_all or isinstance(names, str) else names)
    elif kind:
        target.add_other("adapter", kind, "no such adapter: all weights are trained")
    if rl := source.take("rl"):
        source.set(loss=PREFERENCES.get(str(rl), str(rl)))
        if (beta := source.take("rl_beta")) is not None:
            source.set(beta=float(beta))
    for key in ("load_in_8bit", "load_in_4bit"):
        source.report(key, "the model is not quantized: it is loaded in bfloat16")
    for key in ("evals_per_epoch", "saves_per_epoch"):
        source.report(key, f"set {'eval' if 'eval' in key else 'save'}_interval to a number of steps")
    for key in ("loss_watchdog_threshold", "loss_watchdog_patience"):
        source.report(key, "loss_spike_policy is the like of it")
    source.finish()
    return target


def _read_data(source: FineTuningFile) -> None:
    source.set(seq_length=int(source.take("sequence_len", 512)), packed_sequence=source.take("sample_packing") is True)
    source.set(truncation="right" if source.take("excess_length_strategy") == "truncate" else "drop")
    paths = [_read_set(each, number, source) for number, each in enumerate(source.take("datasets"))]
    source.set(sft_data_path=paths[0] if len(paths) == 1 else paths)
    if held_out := source.take("test_datasets"):
        found = [_read_set(each, number, source) for number, each in enumerate(held_out)]
        source.set(sft_valid_data_path=found[0] if len(found) == 1 else found)
    size = source.take("val_set_size", 0)
    if isinstance(size, float) and size < 1:
        source.set(split=f"{100 * (1 - size):g},{100 * size:g},0")
    elif size:
        source.target.add_other("val_set_size", size, "a number of rows: set split to shares")
    if not size and not held_out:
        source.set(split="100,0,0", eval_iters=0)
    template = source.take("chat_template", "tokenizer_default")
    if template != "tokenizer_default":
        reason = "the chat template is that of the tokenizer: put chat_template.jinja next to it if it is another"
        source.target.add_other("chat_template", template, reason)
    source.report("train_on_inputs", "prompts do not count: train pretrain learns whole texts")
    tokens = source.take("special_tokens", {})
    if set(tokens) - {"pad_token"}:
        source.target.add_other("special_tokens", tokens, "set them in the tokenizer's tokenizer_config.json")


def _read_set(given: Any, number: int, source: FineTuningFile) -> str:
    """The source of one set; its other settings are reported."""
    rest = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    path = str(rest.pop("path", given))
    files = rest.pop("data_files", None)
    if isinstance(files, str) or (isinstance(files, list) and len(files) == 1):
        path = files if isinstance(files, str) else str(files[0])
    elif files:
        rest["data_files"] = files
    rest.pop("ds_type", None)
    if rest.get("split") == "train":
        rest.pop("split")
    if rest.get("type", "chat_template") in FORMS:
        rest.pop("type", None)
    for key, usual in COLUMN_DEFAULTS.items():
        if rest.get(key) in usual:
            rest.pop(key)
    if rest.get("message_property_mappings") in MAPPINGS:
        rest.pop("message_property_mappings")
    if rest.get("roles_to_train") == ["assistant"]:
        rest.pop("roles_to_train")
    if rest.get("train_on_eos") == "last":
        source.set(train_on="last")
    for key, value in rest.items():
        source.target.add_other(f"datasets[{number}].{key}", value, "no key for it here: see the forms of rows in docs")
    is_file = path.endswith(FILES) or path.startswith((".", "/", "~"))
    return path if is_file else f"hf:{path}"
