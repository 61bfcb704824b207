"""Read a configuration of LLaMA-Factory (SFT, LoRA, DPO) as an experiment of native."""

from __future__ import annotations

from primus.config.imports.fine_tuning import MATRICES, PREFERENCES, FineTuningFile
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.foreign_file import ForeignFile

FORMATS = "a YAML file of LLaMA-Factory"
TELLING = ("model_name_or_path", "stage")
REFUSED = {
    "pt": "pretraining",
    "rm": "a reward model",
    "ppo": "reinforcement learning",
    "kto": "KTO",
}
KINDS = {"lora": True, "full": False}


def read_file(file: ForeignFile) -> ForeignConfig | None:
    """The experiment of a configuration; None if the file is another one.

    Raises:
        UsageError: Its stage is not trained here.
    """
    values = file.values
    if file.suffix not in (".yaml", ".yml") or not all(key in values for key in TELLING):
        return None
    FineTuningFile.check_kind(values, "stage", REFUSED, file.shown)
    target = ForeignConfig(origin=f"LLaMA-Factory configuration {file.shown}", name=file.name, framework="native")
    source = FineTuningFile(values, target)
    source.set_model("model_name_or_path")
    _read_data(source)
    source.set_batch("per_device_train_batch_size", 8)
    source.rest.setdefault("learning_rate", 5e-5)
    source.set_shared("linear", "num_train_epochs")
    kind = str(source.take("finetuning_type", "lora"))
    if KINDS.get(kind):
        names = str(source.take("lora_target", "all")).split(",")
        every = set().union(*MATRICES.values())
        chosen = every if names == ["all"] else {each.strip() for each in names}
        source.set_adapter(kind, source.take("lora_alpha"), chosen)
    elif kind not in KINDS:
        target.add_other("finetuning_type", kind, "no such training: all weights are trained")
    if source.take("stage") == "dpo":
        loss = str(source.take("pref_loss", "sigmoid"))
        source.set(loss=PREFERENCES.get(loss, "dpo"), beta=float(source.take("pref_beta", 0.1)))
        if loss not in PREFERENCES:
            target.add_other("pref_loss", loss, "no such loss; it is dpo")
        if loss == "simpo":
            source.set(gamma=float(source.take("simpo_gamma", 0.5)))
        if source.take("pref_ftx"):
            target.add_other("pref_ftx", values["pref_ftx"], "answers are not learned besides")
    source.report("quantization_bit", "the model is not quantized: it is loaded in bfloat16")
    source.finish()
    return target


def _read_data(source: FineTuningFile) -> None:
    names = source.take("dataset")
    reason = "a name of data/dataset_info.json: set sft_data_path to its file, or hf:OWNER/NAME"
    source.set(sft_data_path=[f"{each.strip()}.jsonl" for each in str(names).split(",")])
    source.target.add_other("dataset", names, reason)
    source.report("eval_dataset", "set sft_valid_data_path")
    source.set(seq_length=int(source.take("cutoff_len", 2048)), truncation="right")
    source.target.add_other("cutoff_len", None, "longer examples are cut at their end, not in prompt and answer")
    is_packed, is_neat = source.take("packing", False), source.take("neat_packing", False)
    source.set(packed_sequence=bool(is_packed or is_neat))
    if is_packed and not is_neat:
        source.target.add_other("packing", True, "examples in a sequence do not see each other, as with neat_packing")
    if source.take("mask_history", False):
        source.set(train_on="last")
    source.report("train_on_prompt", "prompts do not count: train pretrain learns whole texts")
    reason = "the chat template is that of the tokenizer: put chat_template.jinja next to it if it is another"
    source.report("template", reason)
    size = source.take("val_size", 0)
    if isinstance(size, float) and size < 1:
        source.set(split=f"{100 * (1 - size):g},{100 * size:g},0")
    elif size:
        source.target.add_other("val_size", size, "a number of rows: set split to shares")
    else:
        source.set(split="100,0,0", eval_iters=0)
    source.report("max_samples", "all rows are trained on: shorten the file")
    source.report("interleave_probs", "set sft_data_path to a blend: [0.7, a.jsonl, 0.3, b.jsonl]")
