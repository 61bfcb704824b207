"""Check what counts in the loss of instruction data: the same check at the start of a run, before it and for a look."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.data.instruction.chat_template import ChatTemplate
from primus.data.instruction.encode import (
    EncodedExamples,
    ExampleEncoder,
    list_trained_messages,
    split_conversation,
)
from primus.data.instruction.examples import Example, read_examples
from primus.data.mask_report import MaskProblem, MaskReport
from primus.errors import UsageError

RENDERED_ROWS = 16
"""Conversations whose prompt is rendered as a server renders it."""
ALLOW = "or set allow_mask_problems: true"


class _Cut(NamedTuple):
    """Examples, by whether they lose something."""

    is_cut: NDArray[np.bool_]
    is_dropped: NDArray[np.bool_]


def check_masks(
    source: str,
    examples: EncodedExamples,
    encoder: ExampleEncoder,
    seq_length: int,
    truncation: str,
    *,
    are_pairs: bool = False,
) -> MaskReport:
    """What counts in the loss of the examples of a file, and what is wrong with it.

    Args:
        source: The file; its first rows are read again.
        examples: Its examples, or the first of them.
        encoder: Has encoded them.
        seq_length: Longest example is one token longer.
        truncation: What happens to longer examples.
        are_pairs: Whether each two examples are answers to one prompt.
    """
    cut = _find_cut(examples, seq_length + 1, truncation, are_pairs)
    problems = [
        *_check_counts(source, examples, are_pairs),
        *_check_begin(examples, encoder),
        *_check_ends(examples, encoder),
    ]
    notes = []
    if examples.num_lost:
        notes.append(f"{examples.num_lost:,} earlier answers do not count: the chat template shortens them")
    num_cut, num_dropped = int(cut.is_cut.sum()), int(cut.is_dropped.sum())
    if num_cut:
        what = f"{num_cut:,} of {len(examples):,} answers do not fit into seq_length {seq_length}"
        if truncation == "refuse" and not are_pairs:
            problems.append(
                MaskProblem(
                    problem=f"{what}: they would be cut, and their end not learned",
                    hint="raise seq_length, or set truncation: drop, right or left",
                )
            )
        else:
            notes.append(f"{what}: {num_dropped:,} examples are dropped, {num_cut - num_dropped:,} are cut")
    if not are_pairs:
        found = _check_prompts(source, examples, encoder)
        problems += found[0]
        notes += found[1]
    return MaskReport(
        source=source,
        examples=len(examples),
        tokens=len(examples.tokens),
        counted_tokens=int(examples.is_counted.sum()),
        lost_answers=examples.num_lost,
        cut_examples=num_cut,
        dropped_examples=num_dropped,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def refuse_problems(report: MaskReport) -> None:
    """Raise UsageError with the first problem of a report."""
    for each in report.problems:
        look = "data inspect --config FILE --step 1 shows the tokens"
        raise UsageError(f"{report.source}: {each.problem}", f"{each.hint}, {ALLOW}; {look}")


def _find_cut(examples: EncodedExamples, length: int, truncation: str, are_pairs: bool) -> _Cut:
    sizes = np.diff(examples.starts)
    if are_pairs:
        is_long = np.repeat(sizes.reshape(-1, 2).sum(1) > length, 2)
        return _Cut(is_long, is_long)
    is_long = sizes > length
    if truncation == "drop":
        return _Cut(is_long, is_long)
    totals = np.concatenate([[0], np.cumsum(examples.is_counted)])
    starts, ends = examples.starts[:-1], examples.starts[1:]
    counted = totals[ends] - totals[starts]
    # From the left, nothing predicts the first token that is left.
    kept_from, kept_to = (ends - length + 1, ends) if truncation == "left" else (starts, starts + length)
    left = np.where(is_long, totals[np.minimum(kept_to, ends)] - totals[np.maximum(kept_from, starts)], counted)
    return _Cut(left < counted, (left == 0) & (counted > 0))


def _check_counts(source: str, examples: EncodedExamples, are_pairs: bool) -> list[MaskProblem]:
    counted = int(examples.is_counted.sum())
    if not counted:
        return [MaskProblem(problem="no token counts in the loss", hint="mark answers by train: true or weight: 1")]
    if are_pairs or counted < len(examples.tokens) - len(examples):  # nothing predicts the first token of an example
        return []
    first = next(read_examples(source))
    if first.prompt:  # of one token
        return []
    hint = "use train pretrain for texts, or give prompts"
    return [MaskProblem(problem="every token counts in the loss, prompts too", hint=hint)]


def _check_begin(examples: EncodedExamples, encoder: ExampleEncoder) -> list[MaskProblem]:
    begin = encoder.tokenizer.bos_id
    firsts = examples.starts[:-1][np.diff(examples.starts) > 1]
    if begin is None or not ((examples.tokens[firsts] == begin) & (examples.tokens[firsts + 1] == begin)).any():
        return []
    token = encoder.tokenizer.decode([begin])
    hint = f"remove {token} from the prompts or from the chat template"
    return [MaskProblem(problem=f"examples begin with {token} twice", hint=hint)]


def _check_ends(examples: EncodedExamples, encoder: ExampleEncoder) -> list[MaskProblem]:
    """Whether answers teach the model to stop: the last counted token of some of them is a special token."""
    is_last = examples.is_counted & ~np.append(examples.is_counted[1:], False)
    is_last[examples.starts[1:] - 1] |= examples.is_counted[examples.starts[1:] - 1]
    ends = Counter(examples.tokens[is_last].tolist())
    tokenizer = encoder.tokenizer
    specials = {tokenizer.eod_id} | {each[0] for each in map(tokenizer.encode, tokenizer.special_strings) if each}
    if not ends or any(token in specials for token in ends):
        return []
    shown = ", ".join(repr(tokenizer.decode([token])) for token, _ in ends.most_common(3))
    return [
        MaskProblem(
            problem=f"the token that ends an answer does not count (answers end with {shown})",
            hint="let the chat template write eos_token behind an answer, inside of {% generation %} if it has that"
            " tag; without a chat template, the tokenizer needs an eos_token",
        )
    ]


def _check_prompts(
    source: str, examples: EncodedExamples, encoder: ExampleEncoder
) -> tuple[list[MaskProblem], list[str]]:
    """Whether the last answer follows the prompt that a server renders, in the same tokens."""
    template, notes = encoder.template, list[str]()
    if template is None:
        return [], []
    for number, example in enumerate(itertools.islice(read_examples(source), min(RENDERED_ROWS, len(examples)))):
        if example.messages is None:
            note = "prompts are texts without the chat template of the tokenizer, by which a chat server renders them"
            return [], [*notes, note]
        if lost := _find_lost_tools(example, template):
            hint = "use a chat template that renders them"
            return [
                MaskProblem(problem=f"row {number + 1}: the chat template does not render {lost}", hint=hint)
            ], notes
        last = len(example.messages) - 1
        if not last or last not in list_trained_messages(example, encoder.train_on):
            continue
        where, specials = f"{source}:{number + 1}", encoder.tokenizer.special_strings
        served = template.render(example.messages[:last], True, example.tools)
        parts, _ = split_conversation(example, encoder.train_on, template, specials, where)
        if problem := _compare_prompt(parts, served, number + 1):
            return [problem], notes
        ids = encoder.tokenizer.encode(served)
        if not notes and ids != examples[number].tokens[: len(ids)].tolist():
            notes.append("a server tokenizes prompts otherwise: the parts of a conversation are not apart in tokens")
    return [], notes


def _find_lost_tools(example: Example, template: ChatTemplate) -> str:
    """What of a conversation with tools the template passes over; empty if nothing."""
    assert example.messages is not None
    whole = template.render(example.messages, tools=example.tools)
    if example.tools and whole == template.render(example.messages):
        return "the column tools"
    without = [{key: value for key, value in each.items() if key != "tool_calls"} for each in example.messages]
    if without != example.messages and whole == template.render(without, tools=example.tools):
        return "tool_calls"
    return ""


def _compare_prompt(parts: list[tuple[str, bool]], served: str, row: int) -> MaskProblem | None:
    """The problem where a conversation does not begin with the prompt `served`, or does not count behind it."""
    trained = "".join(text for text, _ in parts)
    counts = list(itertools.chain.from_iterable([part_counts] * len(text) for text, part_counts in parts))
    if not trained.startswith(served):
        pairs = enumerate(zip(trained, served, strict=False))
        place = next((place for place, (one, other) in pairs if one != other), min(len(trained), len(served)))
        seen, asked = (repr(text[max(place - 10, 0) : place + 20]) for text in (trained, served))
        problem = f"in training the chat template writes {seen} where a server writes {asked}"
    elif not counts[len(served)]:
        problem = f"behind the prompt of a server, training has {trained[len(served) :][:20]!r}, which does not count"
    else:
        return None
    hint = "let add_generation_prompt of the chat template write what stands before an answer"
    return MaskProblem(problem=f"row {row}: {problem}", hint=hint)
