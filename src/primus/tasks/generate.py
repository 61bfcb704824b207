"""Generate text by a checkpoint."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta

from primus.errors import UsageError
from primus.framework import FRAMEWORKS
from primus.model_source.hub_files import NAME_ONE, collect_hub_files
from primus.model_source.options import SourceOptions, open_source
from primus.registry import load_plug_in
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.instruction.encode import ExampleEncoder
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


class Answer(NamedTuple):
    """What follows a prompt."""

    prompt: str
    """As the model sees it."""
    text: str
    tokens: list[int]
    log_probabilities: list[float]
    stop_reason: str


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
    prompts = _read_prompts(options)
    answer = _open_generator(options)
    if prompts is None:
        _talk(answer, context)
        return
    answers = [
        found
        for begin in range(0, len(prompts), options.batch_size)
        for found in answer(prompts[begin : begin + options.batch_size], begin)
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


def _read_prompts(options: Options) -> list[str | list[Message]] | None:
    if options.file is None:
        return None if options.prompt is None else [options.prompt]
    path = Path(os.path.expanduser(options.file))
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}", "name a file with one prompt a line") from None
    if not lines:
        raise UsageError(f"{path}: no prompts", "write one prompt a line")
    if path.suffix != ".jsonl":
        return list(lines)
    return [_parse_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _parse_row(line: str, where: str) -> str | list[Message]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}", "write one JSON object a line") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    is_list = isinstance(prompt, list) and all(isinstance(each, dict) and "role" in each for each in prompt)
    if not (isinstance(prompt, str) or (is_list and prompt)):
        raise UsageError(f"{where}: a row needs a prompt", 'write {"prompt": TEXT} or {"prompt": [messages]}')
    return prompt


def _open_generator(options: Options) -> Callable[[Sequence[str | list[Message]], int], list[Answer]]:
    """The function that answers prompts, the first of which has a number."""
    opened = open_source(options.checkpoint, options)
    exported = collect_hub_files(opened, "native", options.tokenizer)
    if exported.tokenizer is None:
        raise UsageError(f"{opened.found.folder}: no tokenizer: {exported.problem}", NAME_ONE)
    from primus.data.instruction.encode import ExampleEncoder
    from primus.data.tokenizers.sibling_files import GENERATION_CONFIG

    # Its files may be from several places; together they are those of an exported model.
    with tempfile.TemporaryDirectory() as folder:
        for name, content in exported.files.items():
            (Path(folder) / name).write_bytes(content)
        encoder = ExampleEncoder(folder)
    ends = json.loads(exported.files[GENERATION_CONFIG]).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    native: Any = load_plug_in(FRAMEWORKS, "native")
    generate = native.build_generator(opened.spec, opened.weights)
    decode = _build_decoder(encoder, ends)

    def answer(prompts: Sequence[str | list[Message]], first: int) -> list[Answer]:
        encoded = [_encode(each, number, encoder, options) for number, each in enumerate(prompts, first + 1)]
        found = generate(
            [ids for _, ids in encoded],
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed + first,
            ends=ends,
            is_end=lambda tokens: _find_stop(decode(tokens[-_count_tail(options) :]), options.stop) is not None,
        )
        answers = []
        for (text, _), completion in zip(encoded, found.completions, strict=True):
            written = decode(completion.tokens)
            answers.append(Answer(text, written[: _find_stop(written, options.stop)], *completion))
        return answers

    return answer


def _encode(
    prompt: str | list[Message], number: int, encoder: ExampleEncoder, options: Options
) -> tuple[str, list[int]]:
    """A prompt as the model sees it, and its tokens, with those that transformers adds."""
    from primus.data.instruction.chat_template import build_missing_template_error

    if not prompt.strip() if isinstance(prompt, str) else not prompt:
        raise UsageError(f"prompt {number} is empty", "give a text to continue")
    if isinstance(prompt, str) and not options.chat:
        return prompt, encoder.tokenizer.exact.encode_batch([prompt], True)[0].tolist()
    if encoder.template is None:
        raise build_missing_template_error(f"prompt {number}", options.tokenizer or options.checkpoint)
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = encoder.template.render(messages, True)
    return text, encoder.tokenizer.encode(text)


def _build_decoder(encoder: ExampleEncoder, ends: Sequence[int]) -> Callable[[Sequence[int]], str]:
    size = encoder.tokenizer.vocab_size

    def decode(tokens: Sequence[int]) -> str:
        # The embeddings of a model may have more rows than its tokenizer has tokens.
        return encoder.tokenizer.decode([token for token in tokens if token < size and token not in ends])

    return decode


def _count_tail(options: Options) -> int:
    """Last tokens of an answer that can have a stop text: a token has a byte at least."""
    return max((len(text.encode()) for text in options.stop), default=1) + 1


def _find_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def _talk(answer: Callable[[Sequence[str | list[Message]], int], list[Answer]], context: TaskContext) -> None:
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
        found = answer([messages], 0)[0]
        messages.append({"role": "assistant", "content": found.text})
        context.result(found._asdict(), found.text)
