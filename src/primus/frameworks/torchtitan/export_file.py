"""Write an experiment as a Python configuration module of torchtitan 0.3.

The names are those of torchtitan 0.3.0: `Trainer.Config`, the model configurations of `torchtitan.models.llama3` and
`.qwen3`, and for other families the flavors of their `model_registry`.
"""

from __future__ import annotations

from collections.abc import Mapping

from primus.config.exports.foreign_text import ForeignText, LostSetting, comment_lost, is_number, list_lost
from primus.config.load import Resolved
from primus.config.schedule import (
    count_wsd_decay_steps,
    find_decay_end,
    find_final_learning_rate,
    warmup_steps,
)
from primus.config.schema import Experiment, ModelSpec, OptimizerConfig, TrainingConfig
from primus.config.source import ConfigValue
from primus.engine_keys import check_writable, list_lost_keys, list_unwritable_keys, read_key_rules, write_keys
from primus.frameworks.torchtitan.names import FOLDER, MODELS

TARGET = "torchtitan"
FILE_NAME = "train.py"

FUNCTION = "experiment"
"""Name of the function in the module that returns the configuration."""


def format_file(resolved: Resolved, preset: str | None) -> ForeignText:
    """The module, and the settings that it cannot hold.

    Args:
        resolved: The experiment.
        preset: Name of the experiment's model preset, whose flavor is used where a shape cannot be written.

    Raises:
        UsageError: torchtitan has no such model.
    """
    experiment = resolved.experiment
    flavor = _find_flavor(experiment.trainer.model, preset)
    lost = list_lost(resolved, list_lost_keys(FOLDER, experiment.trainer)) + _list_differences(experiment)
    header = [
        f'"""{experiment.exp_name}: pre-training with torchtitan 0.3, exported by primus.',
        "",
        f"    torchrun --nproc_per_node 8 -m torchtitan.train --module THIS_MODULE --config {FUNCTION}",
        "",
        "torchtitan decays the learning rate one step later than primus.",
        '"""',
        *comment_lost(lost),
        "",
    ]
    parts = [_IMPORTS, _write_model(experiment.trainer.model, flavor), _LOADER, _write_config(experiment)]
    return ForeignText("\n".join(header) + "\n".join(parts), lost)


def _find_flavor(model: ModelSpec, preset: str | None) -> tuple[str, str] | None:
    """Family and flavor of torchtitan for a preset that is not a plain Llama or Qwen shape; None if a shape is written.

    Raises:
        UsageError: The shape has a part that torchtitan only has in other flavors.
    """
    found = {ours: (family, flavor) for family, names in MODELS.items() for flavor, ours in names.items()}
    if preset in found and found[preset][0] != "llama4" and list_unwritable_keys(FOLDER, model):
        return found[preset]
    flavors = ", ".join(name for name, (family, _) in found.items() if family != "llama4")
    check_writable("torchtitan 0.3", FOLDER, model, f"flavors: {flavors}")
    return None


def _write_model(model: ModelSpec, flavor: tuple[str, str] | None) -> str:
    if flavor:
        family, name = flavor
        return (
            f"from torchtitan.models.{family} import model_registry\n\nVOCAB_SIZE = {model.vocab_size}\n\n\n"
            f"def build_model() -> ModelSpec:\n    return model_registry({name!r})\n\n"
        )
    is_llama = not model.qk_layernorm and not model.add_qkv_bias
    names = {
        "FAMILY": "llama3" if is_llama else "qwen3",
        "NUM_LAYERS": model.num_layers,
        "DIM": model.hidden_size,
        "HIDDEN_DIM": model.ffn_hidden_size,
        "NUM_HEADS": model.num_attention_heads,
        "NUM_KV_HEADS": model.num_query_groups or model.num_attention_heads,
        "HEAD_DIM": model.kv_channels or model.hidden_size // model.num_attention_heads,
        "VOCAB_SIZE": model.vocab_size,
        "NORM_EPS": model.norm_epsilon,
        "IS_TIED": not model.untie_embeddings_and_output_weights,
        "QK_NORM": model.qk_layernorm,
        "QKV_BIAS": model.add_qkv_bias,
    }
    rope = _name_fields(model, "max_position_embeddings", "rotary_base")
    rope["scaling"] = {"default": "none", "llama3": "llama", "yarn": "yarn"}[model.rope_type]
    if model.rope_type == "llama3":
        rope |= _name_fields(model, "rotary_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor")
        rope |= _name_fields(model, "original_max_position_embeddings")
    elif model.rope_type == "yarn":
        rope |= {
            "rope_factor": model.rotary_scaling_factor,
            "original_seq_len": model.original_max_position_embeddings,
            **_name_fields(model, "beta_fast", "beta_slow", "yarn_correction_range_round_to_int"),
        }
    constants = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    return f"\n{constants}\nROPE = {rope!r}\n{_LLAMA if is_llama else _QWEN}{_BUILD_MODEL}"


def _name_fields(model: ModelSpec, *keys: str) -> dict[str, ConfigValue]:
    """Values of a model by the names of the fields that hold them in torchtitan."""
    rules = read_key_rules(FOLDER)
    return {rules[key].field.rpartition(".")[2]: getattr(model, key) for key in keys}


_IMPORTS = """\
from dataclasses import dataclass
from functools import partial

import numpy
import torch
from torch import nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer
"""

_LLAMA = """
from torchtitan.models.llama3 import Llama3Model as Model
from torchtitan.models.llama3 import Llama3StateDictAdapter as Adapter
from torchtitan.models.llama3 import Llama3TransformerBlock as Block
from torchtitan.models.llama3 import parallelize_llama as parallelize
"""

_QWEN = """
from torchtitan.models.qwen3 import Qwen3Model as Model
from torchtitan.models.qwen3 import Qwen3StateDictAdapter, Qwen3TransformerBlock as Block
from torchtitan.models.qwen3 import parallelize_qwen3 as parallelize


class Adapter(Qwen3StateDictAdapter):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if QKV_BIAS:  # Qwen2.5
            for part in "qkv":
                name = f"model.layers.{{}}.self_attn.{part}_proj.bias"
                self.from_hf_map[name] = f"layers.{{}}.attention.qkv_linear.w{part}.bias"
"""

_BUILD_MODEL = """

def make_linear_init(layer: int | None = None) -> dict:
    std = 0.02 if layer is None else depth_scaled_std(0.02, layer)
    return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}


def make_norm(width: int):
    return RMSNorm.Config(normalized_shape=width, eps=NORM_EPS, param_init={"weight": nn.init.ones_})


def make_inner_attention():
    return get_attention_config("flex")


def make_layer(index: int):
    rope = (ComplexRoPE if FAMILY == "llama3" else CosSinRoPE).Config(dim=HEAD_DIM, **ROPE)
    attention = make_gqa_config(
        dim=DIM, n_heads=NUM_HEADS, n_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, rope=rope, fuse_qkv=True,
        wqkv_param_init=make_linear_init(), wo_param_init=make_linear_init(index),
        inner_attention=make_inner_attention(), qk_norm=make_norm(HEAD_DIM) if QK_NORM else None,
    )
    if QKV_BIAS:
        attention.qkv_linear.wqkv.bias = True
    feed_forward = make_ffn_config(
        dim=DIM, hidden_dim=HIDDEN_DIM, w1_param_init=make_linear_init(), w2w3_param_init=make_linear_init(index)
    )
    return Block.Config(
        attention_norm=make_norm(DIM), ffn_norm=make_norm(DIM), attention=attention, feed_forward=feed_forward
    )


def build_model() -> ModelSpec:
    std = DIM**-0.5
    head = {"weight": partial(nn.init.trunc_normal_, std=std, a=-3 * std, b=3 * std), "bias": nn.init.zeros_}
    embedding = {"weight": skip_param_init if IS_TIED else partial(nn.init.normal_, std=1.0)}
    model = Model.Config(
        dim=DIM, vocab_size=VOCAB_SIZE, enable_weight_tying=IS_TIED, norm=make_norm(DIM),
        layers=[make_layer(index) for index in range(NUM_LAYERS)],
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB_SIZE, embedding_dim=DIM, param_init=embedding),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB_SIZE, param_init=head),
    )
    return ModelSpec(
        name="exported", flavor="exported", model=model, parallelize_fn=parallelize, pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None, state_dict_adapter=Adapter,
    )

"""

_LOADER = '''
class NoTokenizer(BaseTokenizer):
    """The data are token files; torchtitan builds a tokenizer all the same."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path, **kwargs):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    def decode(self, *args, **kwargs):
        raise NotImplementedError

    def get_vocab_size(self):
        return VOCAB_SIZE


class TokenFiles(BaseDataLoader):
    """Consecutive windows of Megatron .bin files, in the order of the file; random tokens without a file."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        prefix: str = ""
        seed: int = 0

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **kwargs):
        self.rank, self.size = dp_rank, dp_world_size
        self.batch, self.length, self.seed, self.step = local_batch_size, seq_len, config.seed, 0
        self.tokens = self.open_tokens(config.prefix) if config.prefix else None

    @staticmethod
    def open_tokens(prefix):
        with open(f"{prefix}.idx", "rb") as index:  # Megatron-LM, indexed_dataset.py: magic, version, code of the type
            header = index.read(18)
        if header[:9] != b"MMIDIDX\\x00\\x00":
            raise ValueError(f"{prefix}.idx is not an index of Megatron-LM")
        kind = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[header[17]]
        return numpy.memmap(f"{prefix}.bin", dtype=kind, mode="r")

    def read_windows(self, start):
        if self.tokens is None:
            generator = numpy.random.default_rng([self.seed, start])
            return generator.integers(VOCAB_SIZE, size=(self.batch, self.length + 1))
        count = (len(self.tokens) - 1) // self.length
        places = [(start + index) % count * self.length for index in range(self.batch)]
        return numpy.stack([self.tokens[place : place + self.length + 1] for place in places]).astype(numpy.int64)

    def __iter__(self):
        positions = torch.arange(self.length).expand(self.batch, -1)
        while True:
            start = (self.step * self.size + self.rank) * self.batch
            windows = torch.from_numpy(self.read_windows(start))
            self.step += 1
            yield {"input": windows[:, :-1].contiguous(), "positions": positions}, windows[:, 1:].contiguous()

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict.get("step", 0)

'''


def _write_config(experiment: Experiment) -> str:
    trainer = experiment.trainer
    training, parallel, optimizer = trainer.training, trainer.parallel, trainer.optimizer
    seconds = parallel.distributed_timeout_minutes * 60
    adam = {"lr": optimizer.lr, "betas": (optimizer.adam_beta1, optimizer.adam_beta2), "eps": optimizer.adam_eps}
    calls = {
        "model_spec": "build_model()",
        "dump_folder": repr(f"{experiment.workspace}/{experiment.exp_name}/torchtitan"),
        "tokenizer": "NoTokenizer.Config()",
        "dataloader": _format_call("TokenFiles.Config", prefix=_find_prefix(experiment), seed=training.seed),
        "loss": f"ChunkedLossWrapper.Config(num_chunks={_choose_chunks(training.seq_length)}, "
        "loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCAB_SIZE))",
        "optimizer": "OptimizersContainer.Config(param_groups=[\n"
        f"            {_format_group('norm', adam | {'weight_decay': 0.0}, is_norm=True)},\n"
        f"            {_format_group('', adam | {'weight_decay': optimizer.weight_decay})},\n        ])",
        "lr_scheduler": _format_call("LRSchedulersContainer.Config", **_list_schedule(optimizer, training)),
        "training": _format_call(
            "TrainingConfig",
            **write_keys(FOLDER, training, "micro_batch_size"),
            global_batch_size=training.global_batch_size or -1,
            **write_keys(FOLDER, training, "seq_length", "train_iters"),
            max_norm=optimizer.clip_grad or float("inf"),
            mixed_precision_param="bfloat16" if training.bf16 else "float32",
        ).replace("max_norm=inf", 'max_norm=float("inf")'),
        "parallelism": _format_call(
            "ParallelismConfig",
            **write_keys(FOLDER, parallel, "tensor_model_parallel_size", "sequence_parallel"),
            **write_keys(FOLDER, parallel, "pipeline_model_parallel_size", "context_parallel_size"),
            **write_keys(FOLDER, parallel, "expert_model_parallel_size"),
            data_parallel_shard_degree=-1,
        ),
        "activation_checkpoint": "FullAC.Config()" if training.recompute_activations else "None",
        "checkpoint": _format_call("CheckpointManager.Config", **_list_checkpoint(experiment)),
        "metrics": _format_call(
            "MetricsProcessor.Config",
            **write_keys(FOLDER, trainer.logging, "log_interval"),
            enable_tensorboard=not trainer.logging.disable_tensorboard,
            enable_wandb=not trainer.logging.disable_wandb,
        ),
        "compile": _format_call("CompileConfig", enable=training.compile is True),
        "comm": _format_call("CommConfig", init_timeout_seconds=seconds, train_timeout_seconds=seconds),
        "debug": _format_call("DebugConfig", **write_keys(FOLDER, training, "seed", "deterministic")),
    }
    body = "\n".join(f"        {name}={call}," for name, call in calls.items())
    return f"\ndef {FUNCTION}() -> Trainer.Config:\n    return Trainer.Config(\n{body}\n    )\n"


def _format_call(name: str, **values: object) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def _format_group(name: str, arguments: Mapping[str, object], *, is_norm: bool = False) -> str:
    """A group of weights; the first whose pattern fits takes a weight. Norms and biases have no weight decay."""
    pattern = r'r"norm\.weight$|\.bias$"' if is_norm else 'r".*"'
    return f'ParamGroupConfig(pattern={pattern}, optimizer_name="AdamW", optimizer_kwargs={arguments!r})'


def _choose_chunks(seq_length: int) -> int:
    """Parts in which the logits of a sequence are computed; they must divide it."""
    return next(count for count in (8, 4, 2, 1) if seq_length % count == 0)


def _find_prefix(experiment: Experiment) -> str:
    path = experiment.trainer.data.train_data_path
    if experiment.trainer.data.mock_data or not path:
        return ""
    return path if isinstance(path, str) and len(path.split()) == 1 else str(_take_first_prefix(path))


def _take_first_prefix(path: str | list[str | float]) -> str:
    words = path.split() if isinstance(path, str) else path
    return str(next((word for word in words if not is_number(word)), ""))


def _list_schedule(optimizer: OptimizerConfig, training: TrainingConfig) -> dict[str, ConfigValue]:
    end = find_decay_end(optimizer, training.train_iters)
    warmup = warmup_steps(optimizer, training.train_iters)
    values: dict[str, ConfigValue] = {"warmup_steps": warmup, "total_steps": end}
    if optimizer.lr_decay_style == "constant":
        return values | {"decay_type": "linear", "min_lr_factor": 1.0}
    if optimizer.lr_decay_style == "WSD":
        values["decay_ratio"] = count_wsd_decay_steps(optimizer, training.train_iters) / end
    style = "cosine" if optimizer.lr_decay_style == "cosine" else "linear"
    return values | {"decay_type": style, "min_lr_factor": find_final_learning_rate(optimizer) / optimizer.lr}


def _list_checkpoint(experiment: Experiment) -> dict[str, ConfigValue]:
    checkpoint = experiment.trainer.checkpoint
    is_saving = bool(checkpoint.save_interval) or not checkpoint.disable_last_saving
    values: dict[str, ConfigValue] = {"enable": is_saving or bool(checkpoint.load)}
    values["interval"] = checkpoint.save_interval or experiment.trainer.training.train_iters
    values["keep_latest_k"] = max(2, checkpoint.keep_last_n) if checkpoint.keep_last_n else 0
    values["async_mode"] = "async" if checkpoint.async_save else "disabled"
    if checkpoint.load:
        path = checkpoint.load.removeprefix("hf:")
        values |= {"initial_load_path": path, "initial_load_in_hf": path != checkpoint.load}
        values["initial_load_model_only"] = checkpoint.finetune
    return values


def _list_differences(experiment: Experiment) -> list[LostSetting]:
    trainer = experiment.trainer
    data, train_iters = trainer.data, trainer.training.train_iters
    found = []
    path = data.train_data_path or ""
    words = path.split() if isinstance(path, str) else path
    if len([word for word in words if not is_number(word)]) > 1:
        found.append(LostSetting("train_data_path", path, "only the first file is read, without weights"))
    end = find_decay_end(trainer.optimizer, train_iters)
    if end < train_iters and trainer.optimizer.lr_decay_style != "constant":
        reason = "after these steps torchtitan continues the curve of the decay beyond its end"
        found.append(LostSetting("lr_decay_iters", end, reason))
    if not trainer.parallel.use_distributed_optimizer:
        reason = "FSDP shards: set data_parallel_replicate_degree to the number of devices to keep all weights on each"
        found.append(LostSetting("use_distributed_optimizer", False, reason))
    return found
