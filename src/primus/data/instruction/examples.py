"""Read examples of instruction data: a JSONL or parquet file, or a dataset of the Hugging Face Hub."""

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
ROLES = ("system", "developer", "user", "assistant", "tool")
FUNCTION_CALL = "function_call"
"""A turn of ShareGPT in which the assistant calls a tool: {"name": ..., "arguments": {...}} as text."""
SHAREGPT_ROLES = {name: name for name in ROLES} | {"human": "user", "observation": "tool", FUNCTION_CALL: "assistant"}
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
    tools: list[object] | None = None
    """Descriptions of tools, which the chat template renders."""
    trained: tuple[bool | None, ...] = ()
    """Whether each message counts in the loss, where the row says it; None where `train_on` decides."""


def read_examples(source: str) -> Iterator[Example]:
    """The examples of a file, or of the split `train` of a dataset of the hub (``hf:OWNER/NAME``).

    Raises:
        UsageError: The file does not exist, or a row is damaged or in none of the known forms; names the line.
        PrimusError: The dataset cannot be loaded.
    """
    for number, row in enumerate(read_rows(source), 1):
        yield parse_example(row, f"{source}:{number}")


def read_rows(source: str) -> Iterator[object]:
    """The rows of a JSONL or parquet file, or of the split `train` of a dataset of the hub.

    Raises:
        UsageError: The file does not exist or is damaged.
        PrimusError: The dataset cannot be loaded.
    """
    if source.startswith(HUB):
        return _read_hub(source.removeprefix(HUB))
    path = Path(os.path.expanduser(source))
    return _read_parquet(path) if path.suffix == ".parquet" else _read_lines(path)


def parse_example(row: object, where: str) -> Example:
    """The example in a row, whose columns say its form.

    Raises:
        UsageError: The row has none of the forms.
    """
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: a row must be an object", f"forms: {FORMS}")
    if "messages" in row:
        return _parse_messages(row["messages"], row, where)
    if "conversations" in row:
        return _parse_messages(_parse_sharegpt(row, where), row, where)
    if "prompt" in row and "completion" in row:
        return _parse_pair(row["prompt"], row["completion"], row, where)
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
        yield from map(_drop_nulls, datasets.load_dataset(name, split="train"))
    except Exception as error:  # datasets raises its own errors, those of the hub, of requests and of pyarrow
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise PrimusError(f"{HUB}{name}: cannot be loaded: {reason}", "check the name, or give a JSONL file") from error


def _read_parquet(path: Path) -> Iterator[object]:
    from primus.data.readers.columns import read_table

    yield from map(_drop_nulls, read_table(str(path)))


def _drop_nulls(value: Any) -> Any:
    """A value of a table without empty fields: tables fill in the fields that only other rows have."""
    if isinstance(value, Mapping):
        return {key: _drop_nulls(each) for key, each in value.items() if each is not None}
    return [_drop_nulls(each) for each in value] if isinstance(value, list) else value


def _parse_messages(given: object, row: Mapping[str, Any], where: str, prompt_size: int = 0) -> Example:
    """A conversation, whose first `prompt_size` messages do not count."""
    if not isinstance(given, list) or not given:
        raise UsageError(f"{where}: messages must be a list of messages", "each has a role and a content")
    messages = [_parse_message(message, where) for message in given]
    if all(message["role"] != "assistant" for message in messages[prompt_size:]):
        raise UsageError(f"{where}: no message of the assistant, so nothing to learn", "remove the row")
    trained = [_take_mark(message, where) for message in messages]
    trained[:prompt_size] = [False] * prompt_size
    return Example(messages, tools=_parse_tools(row.get("tools"), where), trained=tuple(trained))


def _parse_message(given: object, where: str) -> Message:
    is_valid = isinstance(given, Mapping) and given.get("role") in ROLES
    if not is_valid or not ("content" in given or given.get("tool_calls")):  # type: ignore[attr-defined,operator]
        raise UsageError(
            f"{where}: invalid message {str(given)[:80]!r}", f"roles: {', '.join(ROLES)}; each has a content"
        )
    message: Message = dict(given)  # type: ignore[call-overload]
    # A template would write None as a text.
    message["content"] = "" if message.get("content") is None else message["content"]
    if message.get("tool_calls"):
        message["tool_calls"] = [_parse_call(call, where) for call in _parse_json(message["tool_calls"], list, where)]
    return message


def _parse_call(call: object, where: str) -> object:
    """A call of a tool with its arguments as an object, which templates of transformers expect; OpenAI has a text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where}: invalid call of a tool {str(call)[:80]!r}", "it has a name and arguments")
    parsed = {**function, "arguments": _parse_json(function.get("arguments") or {}, dict, where)}
    return {**call, "function": parsed} if "function" in call else {"type": "function", "function": parsed}  # type: ignore[dict-item,operator]


def _parse_tools(given: object, where: str) -> list[object] | None:
    return _parse_json(given, list, where) if given else None


def _parse_json(value: Any, kind: type, where: str) -> Any:
    """A value, or the text of it as JSON, which columns of tables often hold."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, kind):
        what = "a list" if kind is list else "an object"
        raise UsageError(f"{where}: tools, tool_calls or arguments are not {what}", "give JSON, or its text")
    return value


def _take_mark(message: Message, where: str) -> bool | None:
    """Whether a message says that it counts: `weight` 0 or 1 (OpenAI), or `train` (Axolotl); templates see neither."""
    marks = {name: message.pop(name) for name in ("weight", "train") if name in message}
    values = {value for value in marks.values() if value is not None}
    if not values:
        return None
    if len(values) > 1 or not values <= {0, 1}:
        raise UsageError(f"{where}: {marks}: a message counts or does not", "weight: 0 or 1, or train: true or false")
    if True in values and message["role"] != "assistant":
        raise UsageError(f"{where}: {marks} of the {message['role']}: only the assistant is trained", "remove it")
    return True in values


def _parse_sharegpt(row: Mapping[str, Any], where: str) -> list[object]:
    """The turns of ShareGPT as unchecked messages; its column `system`, if there is one, is the first of them."""
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
        marks = {name: turn[name] for name in ("weight", "train") if name in turn}
        calls = {"content": "", "tool_calls": f"[{turn['value']}]"} if turn["from"] == FUNCTION_CALL else {}
        messages.append({"role": role, "content": turn["value"], **calls, **marks})
    return messages


def _parse_pair(prompt: object, completion: object, row: Mapping[str, Any], where: str) -> Example:
    """Both are texts, or both lists of messages, of which those of the completion count."""
    if isinstance(prompt, list) and isinstance(completion, list):
        return _parse_messages([*prompt, *completion], row, where, len(prompt))
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
