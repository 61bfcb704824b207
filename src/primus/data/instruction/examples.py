"""Read examples of instruction data: a JSONL file, or a dataset of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from primus.errors import PrimusError, UsageError

HUB = "hf:"
"""Prefix of a name on the Hugging Face Hub, as in `load:`."""
FORMS = (
    "messages; conversations (ShareGPT); prompt and completion; instruction, input and output; question, context and"
    " answers"
)
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {name: name for name in ROLES} | {"human": "user", "observation": "tool"}
SHAREGPT_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
"""Roles by the names in `from` (FastChat, data/clean_sharegpt.py; LLaMA-Factory, data/README.md)."""

Message = dict[str, object]
"""A message with its `role`, its `content` and what else a chat template reads, such as `tool_calls`."""


class Example(NamedTuple):
    """One example: a conversation, or a text and its continuation."""

    messages: list[Message] | None
    """Messages with `role` and `content`; None for a text."""
    prompt: str = ""
    completion: str = ""


def read_examples(source: str) -> Iterator[Example]:
    """The examples of a JSONL file, or of the split `train` of a dataset of the hub (``hf:OWNER/NAME``).

    Raises:
        UsageError: The file does not exist, or a row is damaged or in none of the known forms; names the line.
        PrimusError: The dataset cannot be loaded.
    """
    for number, row in enumerate(read_rows(source), 1):
        yield parse_example(row, f"{source}:{number}")


def read_rows(source: str) -> Iterator[object]:
    """The rows of a JSONL file, or of the split `train` of a dataset of the hub.

    Raises:
        UsageError: The file does not exist or is damaged.
        PrimusError: The dataset cannot be loaded.
    """
    if source.startswith(HUB):
        return _read_hub(source.removeprefix(HUB))
    return _read_lines(Path(os.path.expanduser(source)))


def parse_example(row: object, where: str) -> Example:
    """The example in a row, whose columns say its form.

    Raises:
        UsageError: The row has none of the forms.
    """
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: a row must be an object", f"forms: {FORMS}")
    if "messages" in row:
        return Example(_check_messages(row["messages"], where))
    if "conversations" in row:
        return Example(_parse_sharegpt(row, where))
    if "prompt" in row and "completion" in row:
        return _parse_pair(row["prompt"], row["completion"], where)
    if "instruction" in row and "output" in row:
        return _parse_alpaca(row, where)
    if "question" in row and "answers" in row:
        return _parse_question(row, where)
    columns = ", ".join(str(key) for key in row) or "none"
    raise UsageError(f"{where}: unknown form of an example (columns: {columns})", f"forms: {FORMS}")


def _read_lines(path: Path) -> Iterator[object]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise UsageError(f"{path}:{number}: not JSON: {error}", "write one JSON object a line") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}", "name a JSONL file in sft_data_path") from None


def _read_hub(name: str) -> Iterator[object]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{HUB}{name}: datasets of the hub need the package datasets", "pip install datasets, or give a JSONL file"
        ) from None
    try:
        yield from datasets.load_dataset(name, split="train")
    except Exception as error:  # datasets raises its own errors, those of the hub, of requests and of pyarrow
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise PrimusError(f"{HUB}{name}: cannot be loaded: {reason}", "check the name, or give a JSONL file") from error


def _check_messages(messages: object, where: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: messages must be a list of messages", "each has a role and a content")
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES or "content" not in message:
            raise UsageError(
                f"{where}: invalid message {str(message)[:80]!r}", f"roles: {', '.join(ROLES)}; each has a content"
            )
    if all(message["role"] != "assistant" for message in messages):
        raise UsageError(f"{where}: no message of the assistant, so nothing to learn", "remove the row")
    return [dict(message) for message in messages]


def _parse_sharegpt(row: Mapping[str, Any], where: str) -> list[Message]:
    """The turns of ShareGPT as messages; its column `system`, if there is one, is the first of them."""
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise UsageError(f"{where}: conversations must be a list of turns", "each has a from and a value")
    messages: list[Any] = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for turn in turns:
        if isinstance(turn, Mapping) and "role" in turn:  # as in `messages`
            messages.append(turn)
            continue
        role = SHAREGPT_ROLES.get(str(turn.get("from"))) if isinstance(turn, Mapping) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise UsageError(
                f"{where}: invalid turn {str(turn)[:80]!r}",
                f"values of from: {', '.join(SHAREGPT_ROLES)}; each turn has a value",
            )
        messages.append({"role": role, "content": turn["value"]})
    return _check_messages(messages, where)


def _parse_pair(prompt: object, completion: object, where: str) -> Example:
    """Both are texts, or both lists of messages."""
    if isinstance(prompt, list) and isinstance(completion, list):
        return Example(_check_messages([*prompt, *completion], where))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise UsageError(f"{where}: prompt and completion must be texts, or lists of messages")
    return Example(None, prompt, completion)


def _parse_alpaca(row: Mapping[str, Any], where: str) -> Example:
    """The prompt of github.com/tatsu-lab/stanford_alpaca (train.py, PROMPT_DICT)."""
    given = row.get("input") or ""
    if not all(isinstance(text, str) for text in (row["instruction"], given, row["output"])):
        raise UsageError(f"{where}: instruction, input and output must be texts")
    if given:
        head = (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request."
        )
        return Example(
            None,
            f"{head}\n\n### Instruction:\n{row['instruction']}\n\n### Input:\n{given}\n\n### Response:\n",
            row["output"],
        )
    head = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    return Example(None, f"{head}\n\n### Instruction:\n{row['instruction']}\n\n### Response:\n", row["output"])


def _parse_question(row: Mapping[str, Any], where: str) -> Example:
    """A question on a text, as in SQuAD, whose `answers` are {"text": [...]}; the first answer counts."""
    answers = row["answers"]
    texts = answers.get("text") if isinstance(answers, Mapping) else None
    if not isinstance(row["question"], str) or not texts or not isinstance(texts[0], str):
        raise UsageError(f"{where}: needs a question and answers: {{text: [...]}}")
    return Example(None, f"Context: {row.get('context', '')} Question: {row['question']} Answer:", f" {texts[0]}")
