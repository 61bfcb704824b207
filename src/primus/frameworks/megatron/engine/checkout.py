"""The model and optimizer of an experiment, built by a checkout of Megatron-LM from arguments that its parser checks.

The arguments are words of a command line, never fields of a namespace: argparse refuses what the checkout does not
know, and converts and validates the rest as for `pretrain_gpt.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_config

from primus.config.schema import Experiment, ModelSpec
from primus.errors import UnfitError, UsageError
from primus.frameworks.megatron.engine.config import collect_values
from primus.frameworks.megatron.engine.driver import EngineParts
from primus.frameworks.megatron.engine.model import compute_frequencies, exclude_padding
from primus.frameworks.megatron.export_file import list_arguments
from primus.session.ranks.engine_errors import find_reason

OWN_ARGUMENTS = frozenset(
    "--data-path --train-data-path --valid-data-path --test-data-path --split --mock-data --tokenizer-type"
    " --tokenizer-model --vocab-size --num-workers --save --save-interval --load --finetune --async-save"
    " --make-vocab-size-divisible-by --tensorboard-dir --wandb-project --wandb-exp-name --eval-interval --eval-iters"
    " --global-batch-size".split()
)
"""Arguments of `pretrain_gpt.py` about what primus does itself: data, checkpoints, reports, evaluation."""
CPU_ARGUMENTS = (
    *("--transformer-impl", "local"),
    *("--distributed-backend", "gloo"),
    *("--attention-backend", "unfused"),
    *("--use-cpu-initialization", "--no-persist-layer-norm", "--no-rope-fusion", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"),
)
"""What Megatron-LM's defaults ask of a GPU, turned off."""


def build_checkout_parts(experiment: Experiment, device: torch.device, global_batch_size: int) -> EngineParts:
    """The model and optimizer, built by Megatron-LM; also makes its process groups and its global state.

    Raises:
        UsageError: Megatron-LM refuses the arguments; the message is its own.
    """
    trainer = experiment.trainer
    initialize, training, add_megatron_arguments = _import_training()
    parser = add_megatron_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    words = [
        *list_words(experiment, global_batch_size, on_gpu=device.type == "cuda"),
        *list_setting_words(parser, trainer.backend_args),
    ]
    # Compiles the helpers of Megatron-LM's own data sets, which are not used.
    initialize._compile_dependencies = lambda: None
    with _explain_refusal(), _set_arguments(words):
        if device.type == "cpu":  # Megatron-LM makes them only where it finds GPUs
            parallel_state.initialize_model_parallel(**collect_values(trainer, "groups"))
        initialize.initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"}, allow_no_cuda=True)
        if device.type == "cpu":
            tensor_parallel.model_parallel_cuda_manual_seed(trainer.training.seed)
        chunks, optimizer, scheduler = training.setup_model_and_optimizer(
            _find_model_provider(trainer.model.vocab_size), ModelType.encoder_or_decoder
        )
    if len(chunks) != 1:
        raise UsageError("virtual pipeline stages are not supported", "remove num_layers_per_virtual_pipeline_stage")
    (model,) = chunks
    config = get_model_config(model)
    config.finalize_model_grads_func = finalize_model_grads
    _set_frequencies(model, trainer.model)
    return EngineParts(model, optimizer, config, scheduler if trainer.optimizer.schedule == "engine" else None)


def _import_training() -> tuple[Any, Any, Any]:
    """The modules of Megatron-LM in addition to megatron-core.

    Raises:
        UnfitError: They cannot be imported; the message has their own reason.
    """
    try:
        from megatron.training import initialize, training
        from megatron.training.arguments import add_megatron_arguments
    except Exception as error:  # whatever the code of the checkout raises
        traceback.print_exc()
        remedy = "the traceback is in the log of the rank"
        if isinstance(error, ModuleNotFoundError):
            remedy = f"{sys.executable} -m pip install {error.name}"
        raise UnfitError(
            f"megatron.training of the checkout cannot be imported: {type(error).__name__}: {find_reason(error)}",
            f"{remedy}; images of Megatron-LM have what it needs",
        ) from error
    return initialize, training, add_megatron_arguments


def list_words(experiment: Experiment, global_batch_size: int, *, on_gpu: bool) -> list[str]:
    """The arguments of an experiment."""
    arguments = [argument for argument in list_arguments(experiment) if argument[0] not in OWN_ARGUMENTS]
    return [
        *(word for argument in arguments for word in argument),
        *("--global-batch-size", str(global_batch_size)),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(experiment.trainer.model.vocab_size - 1)),
        *("--mock-data", "--eval-iters", "0", "--eval-interval", str(experiment.trainer.training.train_iters)),
        *("--calculate-per-token-loss", "--accumulate-allreduce-grads-in-fp32"),
        # The engine looks at loss and gradient norm itself, and skips the step.
        "--no-check-for-nan-in-loss-and-grad",
        *(() if on_gpu else CPU_ARGUMENTS),
    ]


def list_setting_words(parser: argparse.ArgumentParser, settings: Mapping[str, Any]) -> list[str]:
    """The arguments of `backend_args`, by the actions of the checkout's own parser.

    Raises:
        UsageError: The checkout has no such argument, or a switch cannot have the value.
    """
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    words: list[str] = []
    for name, value in settings.items():
        if name not in actions:
            raise UsageError(f"backend_args: {name}: this checkout of Megatron-LM has no such argument", "remove it")
        if value is not None and value != actions[name].default:
            words += format_argument(actions[name], value)
    return words


def format_argument(action: argparse.Action, value: Any) -> list[str]:
    """The words by which a parser sets an argument to a value.

    Raises:
        UsageError: The argument is a switch that stores another value.
    """
    option = action.option_strings[-1]
    if action.nargs == 0:
        if action.const is not value:
            raise UsageError(
                f"backend_args: {action.dest}: {str(value).lower()}: Megatron-LM can only set it to"
                f" {str(action.const).lower()}",
                "remove it",
            )
        return [option]
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return [option, *(str(each) for each in values)]


def _find_model_provider(vocab_size: int) -> Any:
    """The builder of GPT models that `pretrain_gpt.py` of this checkout passes on, without padding in the loss."""
    from gpt_builders import gpt_builder
    from model_provider import model_provider

    def build(*args: Any, **options: Any) -> Any:
        model = gpt_builder(*args, **options)
        exclude_padding(model, vocab_size)
        return model

    return partial(model_provider, build)


def _set_frequencies(model: Any, spec: ModelSpec) -> None:
    """The rotary frequencies of the experiment: Megatron-LM has fixed factors and a fixed original length."""
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    embedding = getattr(inner, "rotary_pos_emb", None)
    if not spec.multi_latent_attention and spec.rotary_percent == 1 and embedding is not None:
        embedding.inv_freq = compute_frequencies(spec).to(embedding.inv_freq.device)


@contextmanager
def _set_arguments(words: Sequence[str]) -> Iterator[None]:
    """Let `sys.argv` be that of `pretrain_gpt.py` for the duration of a `with`."""
    before, sys.argv = sys.argv, ["pretrain_gpt.py", *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _explain_refusal() -> Iterator[None]:
    """Turn argparse's exit into an error with its last line."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
    except SystemExit as error:
        lines = text.getvalue().strip().splitlines() or [f"exit code {error.code}"]
        raise UsageError(f"Megatron-LM refuses the arguments: {lines[-1]}", "change the key that it names") from error
    finally:
        sys.stderr.write(text.getvalue())
