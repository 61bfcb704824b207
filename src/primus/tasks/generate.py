"""Generate text by a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from primus.errors import UsageError
from primus.model_source.options import SourceOptions
from primus.model_source.text_model import AnswerStyle, TextModel, read_lines, read_prompts
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.instruction.examples import Message


class Options(SourceOptions, frozen=True, kw_only=True):
    """Options of `generate`."""

    checkpoint: Annotated[str, Meta(extra={"positional": True})]
    """Folder of a checkpoint, name or folder of a run, *.safetensors or *.bin file, or hf:NAME_OR_PATH."""
    prompt: str | None = None
    """Text to continue; with --chat, what the user says."""
    file: str | None = None
    """Prompts, one a line; in a *.jsonl file, rows with a prompt, which is a text or a list of messages."""
    chat: bool = False
    """Render prompts by the chat template; without --prompt and --file, talk in the terminal."""
    max_new_tokens: Annotated[int, Meta(ge=1)] = 128
    """Longest answer in tokens; it also ends where the context of the model is full."""
    temperature: Annotated[float, Meta(ge=0)] = 0.8
    """Divisor of the logits; at 0 the most likely token is taken, whatever the seed is."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Draw from so many of the most likely tokens; 0 for all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Draw from the fewest most likely tokens that have this probability together."""
    stop: tuple[str, ...] = ()
    """Texts before which an answer ends."""
    seed: int = 0
    """Seed of the draws."""
    batch_size: Annotated[int, Meta(ge=1)] = 32
    """Prompts that are continued at once."""
    tokenizer: str | None = None
    """Tokenizer: a tokenizer.json, a SentencePiece model, a folder with one, or a hub name; by default that
    of the checkpoint, of its run or of the weights that the run began from."""


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What would be read."""
    _check_input(options)
    what = options.file or ("what is typed" if options.prompt is None else "one prompt")
    return [f"{options.checkpoint} would continue {what} by up to {options.max_new_tokens} tokens each"]


def run(options: Options, context: TaskContext) -> None:
    """Print what the model says.

    Raises:
        UsageError: There is no prompt, no tokenizer, or the model is not one that native computes.
        PrimusError: The checkpoint is damaged.
    """
    _check_input(options)
    prompts = _read_all_prompts(options)
    model = TextModel(options.checkpoint, options, options.tokenizer)
    style = AnswerStyle(
        options.max_new_tokens,
        options.chat,
        options.temperature,
        options.top_k,
        options.top_p,
        options.seed,
        options.stop,
    )
    if prompts is None:
        _talk(model, style, context)
        return
    answers = [
        found
        for begin in range(0, len(prompts), options.batch_size)
        for found in model.answer(prompts[begin : begin + options.batch_size], style, begin)
    ]
    text = "\n\n".join((each.text if options.chat else each.prompt + each.text) for each in answers)
    context.result([each._asdict() for each in answers], text)


def _check_input(options: Options) -> None:
    if options.prompt is not None and options.file is not None:
        raise UsageError("--prompt and --file are both given", "give one of them")
    if options.prompt is None and options.file is None and not options.chat:
        raise UsageError("generate needs a prompt", "give --prompt TEXT or --file FILE, or talk with --chat")
    if "" in options.stop:
        raise UsageError("--stop '': an empty text is everywhere", "give a text that ends an answer")


def _read_all_prompts(options: Options) -> list[str | list[Message]] | None:
    if options.file is None:
        return None if options.prompt is None else [options.prompt]
    if options.file.endswith(".jsonl"):
        return [prompt for prompt, _, _ in read_prompts(options.file, "--file")]
    return list(read_lines(options.file, "--file"))


def _talk(model: TextModel, style: AnswerStyle, context: TaskContext) -> None:
    """Answer each line of standard input, as long as there are any."""
    messages: list[Message] = []
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        found = model.answer([messages], style)[0]
        messages.append({"role": "assistant", "content": found.text})
        context.result(found._asdict(), found.text)
