"""The one typed schema of an experiment: validation, flags, JSON Schema and reference docs come from it.

Field names are Megatron-LM's where it has one. Each name belongs to exactly one group, so that the flat
`overrides:` of an experiment file and `--name value` on the command line need no prefix.

This module does without `from __future__ import annotations`: msgspec evaluates an annotation that is a string each
time it lists the fields of a group, which made every command 10 ms slower.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Stage = Literal["pre_trainer", "post_trainer", "sft_trainer"]
Fraction = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]


class ConfigGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every configuration group: frozen, unknown fields forbidden."""


class ModelSpec(ConfigGroup, frozen=True, kw_only=True):
    """Shape of a decoder-only transformer; a model preset is one YAML file of these."""

    hf_name: str = ""
    """Name of the published model on the Hugging Face Hub; also names its tokenizer."""
    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Inner width of a dense SwiGLU feed-forward layer."""
    num_attention_heads: Positive
    """Query heads."""
    num_query_groups: Positive | None = None
    """Key/value heads (grouped-query attention); as many as query heads when null."""
    kv_channels: Positive | None = None
    """Width of one attention head; hidden_size / num_attention_heads when null."""
    vocab_size: Positive
    """Rows of the embedding; the tokenizer must not be larger."""
    max_position_embeddings: Positive = 4096
    """Maximum sequence length of the model, in tokens."""
    untie_embeddings_and_output_weights: bool = True
    """Separate input embedding and output head; false shares one matrix."""
    norm_epsilon: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of the normal initialisation."""
    add_qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2.5)."""
    add_bias_linear: bool = False
    """Bias on every projection, the router and the experts as well (gpt-oss)."""
    qk_layernorm: bool = False
    """RMSNorm on queries and keys of each head (Qwen3)."""
    rotary_base: PositiveFloat = 10000.0
    """Theta of rotary position embedding."""
    rope_type: Literal["default", "llama3", "yarn"] = "default"
    """How rotary frequencies are scaled for long contexts."""
    rotary_scaling_factor: PositiveFloat = 1.0
    """Scaling factor of llama3 or yarn rope."""
    rope_low_freq_factor: PositiveFloat = 1.0
    """Llama 3 rope: wavelengths longer than original length / this are fully scaled."""
    rope_high_freq_factor: PositiveFloat = 4.0
    """Llama 3 rope: wavelengths shorter than original length / this are kept."""
    original_max_position_embeddings: Positive = 8192
    """Context length before rope scaling, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Yarn: rotations above which a dimension is kept."""
    beta_slow: PositiveFloat = 1.0
    """Yarn: rotations below which a dimension is fully scaled."""
    mscale: NonNegativeFloat = 1.0
    """Yarn: attention scale of the rotated part."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """Yarn: attention scale of all dimensions."""
    yarn_correction_range_round_to_int: bool = True
    """Yarn: round the bounds of the scaled dimensions outwards to whole numbers; gpt-oss does not."""
    window_size: Positive | None = None
    """Sliding attention window in tokens; full attention when null."""
    window_layer_period: Positive = 1
    """Every n-th layer, starting with the first, uses the sliding window."""
    hybrid_layer_pattern: Annotated[str, Meta(pattern=r"^[*WMGKCHS-]+$")] | None = None
    """Kinds of the layers, one character each, repeated to num_layers: `*` attention, `W` attention within window_size,
    `M` Mamba-2, `G` gated delta net, `K` Kimi delta attention, `C` short convolution, `S` and `H` DeepSeek-V4's sparse
    and heavily compressed attention, `-` feed-forward. With `-` in it, layers of other kinds have no feed-forward."""
    attention_sinks: bool = False
    """A learned sink logit for each head (gpt-oss)."""
    attention_output_gate: bool = False
    """A learned gate on the attention's output (Qwen3.5, Kimi K3)."""
    qk_layernorm_across_heads: bool = False
    """The norms of queries and keys run over all heads together (MiniMax); needs qk_layernorm."""
    global_kv_channels: Positive | None = None
    """Width of a head of the layers with full attention, where it differs from the windowed ones (Gemma 4)."""
    global_num_query_groups: Positive | None = None
    """Key/value heads of the layers with full attention, where they differ (Gemma 4)."""
    global_share_kv_projections: bool = False
    """Layers with full attention use their keys as values (Gemma 4)."""
    no_rope_freq: Positive | None = None
    """Every n-th layer has no rotary embedding (Llama 4); none when null."""
    attention_chunk_size: Positive | None = None
    """Layers with rotary embedding attend within chunks of this many tokens (Llama 4); none when null."""
    rotary_percent: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of a head's width that gets rotary embedding."""
    post_layernorm: bool = False
    """A norm after attention and feed-forward as well (Gemma, Grok)."""
    final_logit_softcapping: PositiveFloat | None = None
    """Soft limit of the logits (Gemma, Grok); none when null."""
    ffn_activation: Literal["silu", "gelu"] = "silu"
    """Activation of the gated feed-forward."""
    activation_clamp: PositiveFloat | None = None
    """Limit of the clamped SwiGLU (gpt-oss); none when null."""
    num_residual_streams: Positive = 1
    """Streams of the hyper-connections (DeepSeek-V4)."""
    attn_res_block_size: Positive | None = None
    """Layers between the states that attention residuals attend to (Kimi K3); plain residuals when null."""
    mamba_state_dim: Positive = 128
    """Mamba-2: width of the state."""
    mamba_head_dim: Positive = 64
    """Mamba-2: width of one head."""
    mamba_num_groups: Positive = 8
    """Mamba-2: groups of heads that share the state's projections."""
    mamba_expand: Positive = 2
    """Mamba-2: inner width as a multiple of hidden_size."""
    mamba_d_conv: Positive = 4
    """Mamba-2: width of the convolution."""
    linear_num_key_heads: Positive | None = None
    """Linear attention (`G`, `K`): query and key heads."""
    linear_num_value_heads: Positive | None = None
    """Linear attention: value heads."""
    linear_key_head_dim: Positive | None = None
    """Linear attention: width of a key head."""
    linear_value_head_dim: Positive | None = None
    """Linear attention: width of a value head."""
    linear_conv_kernel_dim: Positive = 4
    """Linear attention and short convolution: width of the convolution."""
    linear_full_rank_gate: bool = False
    """Kimi delta attention: the output gate is one projection, not two through a latent (Kimi K3)."""
    num_experts: Positive | None = None
    """Routed experts of a mixture-of-experts layer; a dense model when null."""
    moe_router_topk: Positive = 2
    """Experts that each token is sent to."""
    moe_ffn_hidden_size: Positive | None = None
    """Inner width of one expert; ffn_hidden_size when null."""
    moe_shared_expert_intermediate_size: Positive | None = None
    """Inner width of the shared experts together; none when null."""
    first_k_dense_replace: NonNegative = 0
    """First layers that stay dense in a mixture-of-experts model (DeepSeek)."""
    moe_layer_freq: Positive = 1
    """Every n-th layer has experts, starting with layer n (Llama 4 Maverick: 2)."""
    moe_shared_expert_gate: bool = False
    """A learned gate on the shared experts (Qwen3.5)."""
    moe_latent_size: Positive | None = None
    """Width that tokens are projected to for the routed experts (Kimi K3); hidden_size when null."""
    moe_parallel_dense: bool = False
    """A dense feed-forward of ffn_hidden_size parallel to the experts of each layer, with separate norms (Gemma 4)."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """How the router scores experts."""
    moe_router_pre_softmax: bool = True
    """Softmax over all experts before top-k; false applies it to the chosen ones."""
    moe_router_norm_topk_prob: bool = False
    """Renormalise the probabilities of the chosen experts."""
    moe_router_enable_expert_bias: bool = False
    """A learned bias for each expert that balances load without an auxiliary loss (DeepSeek-V3)."""
    num_hash_layers: NonNegative = 0
    """First layers with experts that choose them by the id of the token (DeepSeek-V4): no bias balances their load."""
    moe_router_num_groups: Positive | None = None
    """Groups of experts for group-limited routing."""
    moe_router_group_topk: Positive | None = None
    """Groups that a token may be sent to."""
    moe_router_topk_scaling_factor: PositiveFloat = 1.0
    """Factor on the routed output."""
    moe_apply_probs_on_input: bool = False
    """The probability of an expert multiplies its input instead of its output (Llama 4); with one expert of a token."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss."""
    multi_latent_attention: bool = False
    """Multi-head latent attention (DeepSeek) instead of grouped-query attention."""
    q_lora_rank: Positive | None = None
    """Latent width of the queries; full projection when null."""
    kv_lora_rank: Positive | None = None
    """Latent width of keys and values."""
    qk_head_dim: Positive | None = None
    """Width of the part of a head without rotary embedding."""
    qk_pos_emb_head_dim: Positive | None = None
    """Width of the part of a head with rotary embedding."""
    v_head_dim: Positive | None = None
    """Width of a value head."""
    dsa_indexer_n_heads: Positive | None = None
    """Heads of the indexer of sparse attention (DeepSeek-V3.2 and V4, GLM-5); none when null."""
    dsa_indexer_head_dim: Positive | None = None
    """Width of an indexer's head."""
    dsa_indexer_topk: Positive | None = None
    """Keys that sparse attention keeps for each query."""
    o_lora_rank: Positive | None = None
    """Latent width of the attention's output in each group (DeepSeek-V4)."""
    o_groups: Positive = 1
    """Groups of heads with separate output latents (DeepSeek-V4)."""
    mtp_num_layers: NonNegative = 0
    """Multi-token-prediction layers (DeepSeek-V3); not counted as parameters of the main model."""


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
    """Try the engine of the framework also in a version that the backend does not support."""
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
    """After max_nonfinite_steps: `skip` stops, `rewind` returns to a good checkpoint; `stop` stops at the first one."""
    loss_spike_policy: Literal["none", "skip", "rewind", "stop"] = "none"
    """On a loss spike: skip the batch, rewind to a checkpoint and skip its data, or stop."""
    loss_spike_factor: PositiveFloat = 6.0
    """A loss is a spike above median + this many standard deviations of the losses before it."""
    loss_spike_window: Annotated[int, Meta(ge=8)] = 128
    """Finite losses that define a spike; detection starts after this many."""
    max_rewinds: Positive = 10
    """Maximum rewinds of a run; the next one stops it."""
    init: Literal["primus", "engine"] = "primus"
    """Initial weights: `primus` draws the same ones for every engine, from the seed; `engine` leaves them to it."""
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
    """AdamW and its learning-rate schedule."""

    optimizer: Literal["adam", "adamw"] = "adamw"
    """Optimizer; both names mean AdamW with decoupled weight decay, as in Megatron."""
    lr: PositiveFloat = 3e-4
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
    """Folder of the checkpoints; `checkpoints/` in the run folder when null."""
    save_interval: Positive | None = None
    """Steps between checkpoints; only the last step when null."""
    keep_last_n: Positive | None = None
    """Number of newest checkpoints to keep; all when null."""
    async_save: bool = True
    """Write checkpoints in the background."""
    disable_last_saving: bool = False
    """Skip the checkpoint after the last step."""
    auto_continue_train: bool = False
    """Resume the newest unfinished run with the same experiment name and configuration."""
    load: str | None = None
    """Checkpoint, folder of checkpoints or run folder to start from; or weights: hf:NAME, a folder of Hugging Face,
    torchtitan or Megatron."""
    finetune: bool = False
    """Load only the weights: a new optimizer, schedule and data order."""
    allow_other_data: bool = False
    """Accept a `load` checkpoint that was trained on other data."""


class LoggingConfig(ConfigGroup, frozen=True, kw_only=True):
    """What a run reports during training."""

    log_interval: Positive = 1
    """Steps between printed lines; every step is in events.jsonl."""
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
    backend_args: dict[str, Any] = {}
    """Settings that only this backend understands; checked by the backend."""


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
    env: dict[str, str] = {}
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
