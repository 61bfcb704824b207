"""The one typed schema of an experiment: validation, flags, JSON Schema and reference docs come from it.

Field names are Megatron-LM's where it has one. Each name belongs to exactly one group, so that the flat
`overrides:` of an experiment file and `--name value` on the command line need no prefix.

This module does without `from __future__ import annotations`: msgspec evaluates an annotation that is a string each
time it lists the fields of a group, which made every command 10 ms slower.
"""

from typing import Annotated, Any, Literal

from msgspec import NODEFAULT, Meta, field

from primus.config.model_spec import (
    BelowOne,
    Fraction,
    LearningRate,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
)
from primus.config.model_spec import ConfigGroup as ConfigGroup
from primus.config.model_spec import ModelSpec as ModelSpec

Stage = Literal["pre_trainer", "post_trainer", "sft_trainer", "rl_trainer"]


class TrainingConfig(ConfigGroup, frozen=True, kw_only=True):
    """Length, batch, precision and evaluation of a training run."""

    train_iters: Positive = 1000
    """Optimizer steps."""
    micro_batch_size: Positive = 1
    """Sequences in one forward pass of one device."""
    global_batch_size: Positive | None = None
    """Sequences in one optimizer step; micro batch x data-parallel size when null, else gradients accumulate."""
    seq_length: Positive = 1024
    """Tokens in one sequence."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses the AMD or NVIDIA GPUs of the machine, or the CPU if there are none; `cpu` ignores GPUs."""
    allow_version: bool = False
    """Allow a version of the engine that the framework does not support."""
    allow_settings_not_in_force: bool = False
    """Continue after the first step although the engine trains with other settings than those asked for."""
    bf16: bool = True
    """Compute in bfloat16 with fp32 master weights; false computes in fp32."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Matrix products in 8-bit floating point: e4m3, or hybrid with e5m2 gradients; none when null."""
    seed: NonNegative = 1234
    """Seed of the initial weights and of the data order."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile of the model and its loss; `auto` compiles if the run is long enough to amortize it."""
    deterministic: bool = False
    """Use only deterministic kernels, which may be slower (CPU runs are always bit-identical)."""
    recompute_activations: bool = False
    """Recompute the activations of each layer in the backward pass: less memory, more time."""
    loss_chunk_size: Positive | None = None
    """Tokens whose logits are in memory at once; derived from the vocabulary size when null."""
    eval_interval: Positive | None = None
    """Steps between evaluations; none when null."""
    eval_iters: NonNegative = 10
    """Global batches in one evaluation; 0 disables evaluation."""
    max_nonfinite_steps: Positive = 5
    """Consecutive steps with a non-finite loss or gradient before nonfinite_policy applies; each is skipped."""
    nonfinite_policy: Literal["skip", "rewind", "stop"] = "skip"
    """Non-finite steps are skipped; after max_nonfinite_steps in a row, `skip` stops the run, and `rewind` returns to a
    good checkpoint. `stop` stops at the first one."""
    loss_spike_policy: Literal["none", "skip", "rewind", "stop"] = "none"
    """On a loss spike: skip the batch, rewind to a checkpoint and skip its data, or stop."""
    loss_spike_factor: PositiveFloat = 6.0
    """A loss is a spike above median + this many standard deviations of the losses before it."""
    loss_spike_window: Annotated[int, Meta(ge=8)] = 128
    """Finite losses that define a spike; detection starts after this many."""
    max_rewinds: Positive = 10
    """Maximum rewinds of a run; the next one stops it."""
    init: Literal["primus", "engine"] = "primus"
    """Initial weights: `primus` draws the same ones for every engine, from the seed; `engine` uses the engine's own."""
    callbacks: str | list[str | dict[str, dict[str, Any] | None]] | None = None
    """Actions inside the training loop: names, or {name: {option: value}}; none when null."""


class DataConfig(ConfigGroup, frozen=True, kw_only=True):
    """Where the tokens come from."""

    data_path: str = "./data"
    """Folder for named datasets: prepared on first use, then reused."""
    dataset: str | None = None
    """Named dataset, prepared on first use (see `data prepare --list`); null with train_data_path."""
    train_data_path: str | list[str | float] | None = None
    """Prefix of Megatron .bin/.idx files (without the extension), several, or a blend: weight, prefix, ..."""
    valid_data_path: str | list[str | float] | None = None
    """Prefix or blend of the validation data; a split of the training data when null."""
    test_data_path: str | list[str | float] | None = None
    """Prefix or blend of the test data; a split of the training data when null."""
    sft_data_path: str | list[str | float] | None = None
    """Data of `train posttrain` and `train rl`: a JSONL or parquet file of conversations or prompts, hf:NAME, several
    of them, or a blend: weight, file, ..."""
    sft_valid_data_path: str | list[str | float] | None = None
    """Instruction data for validation; a split of sft_data_path when null."""
    packed_sequence: bool = False
    """Put several examples of sft_data_path into one sequence; they do not attend to each other."""
    train_on: Literal["all", "last"] = "all"
    """Messages of the assistant that count in the loss, where `weight` or `train` of a message does not say it."""
    truncation: Literal["refuse", "drop", "left", "right"] = "refuse"
    """Examples longer than seq_length: refuse the data if an answer is cut, drop them, or cut tokens at this end."""
    allow_mask_problems: bool = False
    """Train although the check of instruction data finds that nothing counts, no end is learned, or the like."""
    split: str = "99,1,0"
    """Shares of training, validation and test documents, if one prefix serves all."""
    dataloader: Literal["primus", "engine"] = "primus"
    """Order of the samples: `primus` gives every engine the same batches; `engine` uses its loader."""
    mock_data: bool = False
    """Use random tokens instead of a dataset, to measure speed."""
    tokenizer_type: Literal[
        "HuggingFaceTokenizer",
        "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer",
        "Llama2Tokenizer",
        "TikTokenizer",
        "GPT2BPETokenizer",
        "ByteLevelBPE",
    ] = "HuggingFaceTokenizer"
    """Type of tokenizer_model, as in Megatron; or ByteLevelBPE, trained on the dataset."""
    tokenizer_model: str | None = None
    """A tokenizer.json, SentencePiece .model or .tiktoken file, folder, or Hub name; the data's tokenizer when null."""
    eod_mask_loss: bool = False
    """Exclude the prediction after each end-of-document token from the loss."""
    reset_position_ids: bool = False
    """Restart positions at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """Prevent attention to earlier documents in the same sequence."""
    create_attention_mask_in_dataloader: bool = False
    """Must be false: masks are created on the device."""
    fim_rate: Fraction = 0.0
    """Share of documents rearranged for fill-in-the-middle; 0 disables it."""
    fim_spm_rate: Fraction = 0.5
    """Share of those in which the suffix comes before the prefix."""
    fim_prefix_token: str = "<fim_prefix>"  # noqa: S105
    """Token before the prefix; it must be in the tokenizer."""
    fim_middle_token: str = "<fim_middle>"  # noqa: S105
    """Token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"  # noqa: S105
    """Token before the suffix."""
    num_workers: NonNegative = 1
    """Threads that read batches ahead of the step; 0 reads inside the step."""


class OptimizerConfig(ConfigGroup, frozen=True, kw_only=True):
    """The optimizer and its learning-rate schedule."""

    optimizer: Literal["adam", "adamw", "adamw_8bit", "muon", "sgd"] = "adamw"
    """Optimizer; adam and adamw mean AdamW with decoupled weight decay, as in Megatron. adamw_8bit has 8-bit states,
    muon is Muon for the matrices of layers and AdamW for the rest, sgd has momentum."""
    lr: LearningRate = 3e-4
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    min_lr_ratio: Fraction | None = None
    """Learning rate at the end of the decay as a share of lr, instead of min_lr."""
    lr_decay_style: Literal["cosine", "linear", "WSD", "constant"] = "cosine"
    """Shape of the decay after warm-up; WSD is warm-up, stable, decay."""
    lr_warmup_iters: NonNegative = 0
    """Steps of linear warm-up."""
    lr_warmup_fraction: Fraction | None = None
    """Warm-up as a share of the decay steps, instead of lr_warmup_iters."""
    lr_decay_iters: Positive | None = None
    """Step at which the decay ends; train_iters when null."""
    lr_wsd_decay_iters: NonNegative | None = None
    """Steps of the final decay of WSD; a fifth of the decay steps when null."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; not applied to norms and biases."""
    adam_beta1: BelowOne = 0.9
    """Decay of the first moment."""
    adam_beta2: BelowOne = 0.95
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Epsilon of Adam."""
    schedule: Literal["primus", "engine"] = "primus"
    """Learning rate: `primus` applies the same one at each step of every engine; `engine` uses its schedule."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 disables clipping."""


class ParallelConfig(ConfigGroup, frozen=True, kw_only=True):
    """Distribution of the model and the batch over devices."""

    tensor_model_parallel_size: Positive = 1
    """Devices that share each layer's matrices."""
    pipeline_model_parallel_size: Positive = 1
    """Pipeline stages: devices that hold consecutive layers."""
    context_parallel_size: Positive = 1
    """Devices that share each sequence."""
    expert_model_parallel_size: Positive = 1
    """Devices that share the experts."""
    sequence_parallel: bool = False
    """Shard activations along the sequence between tensor-parallel regions."""
    use_distributed_optimizer: bool = True
    """Shard weights, gradients and optimizer state over the data-parallel devices (FSDP2)."""
    distributed_timeout_minutes: Positive = 60
    """Timeout of a collective, in minutes."""


class CheckpointConfig(ConfigGroup, frozen=True, kw_only=True):
    """What is saved, and what a run starts from."""

    save: str | None = None
    """Folder of the checkpoints; `checkpoints/` in the run folder when null. A URL (s3://...) gets copies of those."""
    save_interval: Positive | None = None
    """Steps between checkpoints; only the last step when null."""
    keep_last_n: Positive | None = None
    """Number of newest checkpoints to keep; all when null."""
    async_save: bool = True
    """Write checkpoints in the background."""
    max_failed_saves: Positive = 3
    """Checkpoints in a row that cannot be written before the run fails; a failed last one fails it, too."""
    disable_last_saving: bool = False
    """Skip the checkpoint after the last step."""
    auto_continue_train: bool = False
    """Resume the newest unfinished run with the same experiment name and configuration."""
    load: str | None = None
    """Checkpoint, folder of checkpoints (also at a URL) or run folder to start from; or weights: hf:NAME, a folder of
    Hugging Face, torchtitan or Megatron."""
    finetune: bool = False
    """Load only the weights: a new optimizer, schedule and data order."""
    allow_other_data: bool = False
    """Accept a `load` checkpoint that was trained on other data."""


class LoggingConfig(ConfigGroup, frozen=True, kw_only=True):
    """What a run reports during training."""

    log_interval: Positive = 1
    """Steps between printed lines; every step is in events.jsonl."""
    log_format: Literal["auto", "short", "long"] = "auto"
    """Printed lines: `short`, or `long` as Megatron-LM's; `auto` is short on a terminal. Log files have long ones."""
    disable_tensorboard: bool = False
    """Do not write TensorBoard files."""
    disable_wandb: bool = True
    """Do not report to Weights & Biases."""
    wandb_project: str | None = None
    """Weights & Biases project; exp_name when null."""
    wandb_exp_name: str | None = None
    """Weights & Biases run name; the run's id when null."""
    disable_mlflow: bool = True
    """Do not report to MLflow."""
    mlflow_tracking_uri: str | None = None
    """MLflow server; MLflow's own default when null."""
    observers: str | list[str | dict[str, dict[str, Any] | None]] | None = None
    """What follows the run from its launcher, such as prometheus, opentelemetry or notify: names, or {name: {option:
    value}}; none when null."""
    sample_tokens: NonNegative = 64
    """Length of the text generated after the last step, in tokens; 0 for none."""
    sample_prompt: str = ""
    """Prompt of the generated text; the start of a document when empty."""
    profile: bool | str = False
    """Record a profile: `steps=5:8` for steps 5 to 8; true for those of profile_step_start and profile_step_end."""
    profile_step_start: Positive = 10
    """First step of the profile; earlier ones compile and fill caches."""
    profile_step_end: Positive = 12
    """First step after the profile, as in Megatron-LM."""
    profile_ranks: int | str | list[int] = 0
    """Processes that record a profile: `0,8` or a list."""
    profile_memory: bool = False
    """Record every allocation in the profile."""
    torch_profiler_record_shapes: bool = True
    """Record the shapes of the inputs of each operator in the profile."""
    torch_profiler_with_stack: bool = False
    """Record Python stacks in the profile; steps become slower, and files larger."""
    torch_profiler_use_gzip: bool = True
    """Compress the files of the profile."""


class Trainer(ConfigGroup, frozen=True, kw_only=True):
    """One module of an experiment with every preset and override applied."""

    framework: str = "native"
    """Backend that trains."""
    model: ModelSpec
    """Shape of the model."""
    training: TrainingConfig = TrainingConfig()
    """Length, batch, precision and evaluation."""
    data: DataConfig = DataConfig()
    """Where the tokens come from."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout over devices."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and loading."""
    logging: LoggingConfig = LoggingConfig()
    """Reports."""
    backend_args: dict[str, Any] = field(default_factory=dict)
    """Settings that only this framework understands; checked by the framework."""


class Experiment(ConfigGroup, frozen=True, kw_only=True):
    """A resolved experiment: what a run trains, where it writes, and with which variables."""

    work_group: str = "primus"
    """Team that the run belongs to."""
    user_name: str = "user"
    """Person that the run belongs to."""
    exp_name: str
    """Name of the experiment; run folders are `<workspace>/<exp_name>/<run id>`."""
    workspace: str = "./output"
    """Folder that holds all run folders."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers."""
    stage: Stage = "pre_trainer"
    """Module of the experiment file that this is."""
    trainer: Trainer
    """The module itself."""


GROUPS: dict[str, type[ConfigGroup]] = {
    "model": ModelSpec,
    "training": TrainingConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}
"""Group of a Trainer by field name."""

OWNERS: dict[str, str] = {name: group for group, struct in GROUPS.items() for name in struct.__struct_fields__}
"""Group that owns each flat key."""

DEFAULTS: dict[str, Any] = {
    name: default
    for struct in GROUPS.values()
    for name, default in zip(
        struct.__struct_fields__[-len(struct.__struct_defaults__) :], struct.__struct_defaults__, strict=True
    )
    if default is not NODEFAULT
}
"""Default of each flat key; a required one is missing."""
