"""Classify the shapes of log lines, which are the lines without digits: most shapes of a long log show nothing."""

from __future__ import annotations

import functools
import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator

from msgspec import Struct

from primus.diagnosis.logs import LONGEST_LINE
from primus.diagnosis.signature import Signature, SignaturePattern, SignatureTable

DIGITS = b"0123456789"
_WORD_SEPARATORS = bytes(byte if chr(byte).isalpha() and byte < 128 else 32 for byte in range(256))
_EXIT_TEXTS = (
    b"exitcode", b"exit code", b"Exit Code", b"Exit code", b"exitCode", b"exit_code", b"exited with code",
    b"return code", b"xit status", b"xited with status",
)  # fmt: skip
ROOT_CAUSE = b"Root Cause (first observed failure)"
_PROGRESS = re.compile(
    rb"(?i)iteration +/ |\bstep[: =].*(loss|tokens/s|tps|skipped)|training epoch .*iteration|completed step:"
    rb"|'loss': .*'epoch': |\[batch=/\]|\b(?:epoch|iter(?:ation)?)\b.*\bloss\S*(?:[:=] ?| )(?:\{'\w+': )?-?\."
    rb"|(?:it/s|s/it)\b.*\bloss\S*[:=] ?-?\."
    rb"|\[ */\] +eta: "
)
"""Lines by which trainers report a step, without their digits: Megatron-LM, torchtitan, DeepSpeed, NeMo, MaxText, the
Hugging Face Trainer, llm-foundry, MMEngine, CoreNet, tqdm, and the loggers of DETR, MAE and LAVIS."""
_NOT_FINITE = re.compile(rb"(?i)(?:\b|_)(?:loss|grad[ _]?norm)\b\W{1,4}nan\b")
"""A step whose values are not finite is no progress."""
_RAISED = re.compile(rb"\b\w*(?:Error|Exception): ")
"""An exception, whose message may name the step and the loss."""
_PROGRESS_TEXTS = (b"iter", b"Iter", b"step", b"poch", b"[batch=", b"s/it", b"it/s", b"  eta: ")
_DONE_TEXTS = (b"after training is done", b"Training completed", b"'train_runtime'", b"`Trainer.fit` stopped: `max_")
"""Last lines of a training that succeeded: Megatron-LM, torchtitan, the Hugging Face Trainer, Lightning."""
_QUOTED = re.compile(
    rb"^\s*(?:evidence: +)?[^\s:]+\.(?:log|out|err|txt|json)(?:\.\w+)?:: "
    rb"|^(?:\s*\[[^\]]*\]:?|\s*:)*\s*(?:(?:#|//(?! ::)) |[\w-]+ \.{3,} |patch [\w-]+: [\w.-]+ \S*: "
    rb"|\xe2\x94\x82 +(?:\xe2\x9d\xb1)? *\d* *\xe2\x94\x82 "
    rb"|(?:declare -x |export )?[A-Z_][A-Z\d_]{3,}=|\+{1,3} [\w./])"
)
"""What a launcher or `diagnose` quotes from a log; a comment; a setting as Megatron lists them; a patch that a worker
reports, whose reason names the failure that it prevents; the source in a traceback of `rich`; a variable of the
environment; and a command that a shell traces.

`// ::` is a date and a time of Go's logger without their digits.
"""
_ADVICE = (
    b"might be asynchronously reported",
    b"For debugging consider passing",
    b"Compile with TORCH_USE_",
    b"Device-side assertion tracking was not enabled by user",
)
"""Texts of lines that only advise and follow many kinds of errors (of CUDA, and the HIP and AMD counterparts)."""


class LineShape(Struct, frozen=True):
    """What the lines of one shape can show."""

    patterns: tuple[tuple[SignaturePattern, Signature], ...] = ()
    may_exit: bool = False
    is_block: bool = False
    is_progress: bool = False
    is_done: bool = False

    @property
    def is_uninteresting(self) -> bool:
        return not (self.patterns or self.may_exit or self.is_block)


UNINTERESTING = LineShape()


def _strip_digits(text: str) -> bytes:
    return text.encode().translate(None, DIGITS)


class PatternIndex(Struct, frozen=True):
    """The texts of all patterns, without digits, and the words that they consist of."""

    by_text: dict[bytes, list[tuple[SignaturePattern, Signature]]]
    words_by_text: dict[bytes, frozenset[bytes]]
    words: frozenset[bytes]

    def select_texts(self, data: bytes) -> list[bytes]:
        """Texts whose words all occur in `data`, perhaps as parts of words.

        The distinct words of a log are far shorter than the log, so that searching them costs little.
        """
        distinct = b" ".join(set(data.translate(_WORD_SEPARATORS).split()))
        present = {word for word in self.words if word in distinct}
        return [text for text, words in self.words_by_text.items() if words <= present]


@functools.cache
def index_patterns(table: SignatureTable) -> PatternIndex:
    """The index of all patterns of a table; built once for each."""
    by_text: dict[bytes, list[tuple[SignaturePattern, Signature]]] = {}
    for signature in table.signatures:
        for pattern in signature.patterns:
            by_text.setdefault(_strip_digits(pattern.text), []).append((pattern, signature))
    texts = (*by_text, *_EXIT_TEXTS, ROOT_CAUSE, *_PROGRESS_TEXTS, *_DONE_TEXTS)
    words_by_text = {text: frozenset(text.translate(_WORD_SEPARATORS).split()) for text in texts}
    return PatternIndex(by_text, words_by_text, frozenset(itertools.chain(*words_by_text.values())))


def is_quoted(line: bytes) -> bool:
    """Whether the line is advice, a comment, a setting, or quoted from another log; with or without its digits."""
    return any(advice in line for advice in _ADVICE) or _QUOTED.search(line) is not None


def is_progress(text: bytes) -> bool:
    """Whether the line reports a step, or the end of a training that succeeded."""
    return any(done in text for done in _DONE_TEXTS) or _is_step_report(text.translate(None, DIGITS))


def shows_not_finite(text: bytes) -> bool:
    """Whether the line reports a loss or the norm of a gradient that is not a number."""
    return _NOT_FINITE.search(text) is not None


def _is_step_report(shape: bytes) -> bool:
    return not _RAISED.search(shape) and not shows_not_finite(shape) and _PROGRESS.search(shape) is not None


def find_meaningful_shapes(unknown: list[bytes], index: PatternIndex) -> Iterator[tuple[bytes, LineShape]]:
    """The shapes that show something. Each text is searched in all of them at once, which is fast."""
    if not unknown:
        return
    short = [_shorten_shape(shape) for shape in unknown]
    data = b"\n".join(short)
    starts = [0, *itertools.accumulate(len(each) + 1 for each in short)]
    marked: dict[int, list[bytes]] = {}
    for text in index.select_texts(data):
        for number in _find_lines_holding(text, data, starts):
            marked.setdefault(number, []).append(text)
    for number, texts in marked.items():
        yield unknown[number], _classify_shape(short[number], texts, index)


def _shorten_shape(shape: bytes) -> bytes:
    if len(shape) <= LONGEST_LINE:
        return shape
    return shape[: LONGEST_LINE // 2] + shape[-LONGEST_LINE // 2 :]


def _find_lines_holding(text: bytes, data: bytes, starts: list[int]) -> Iterator[int]:
    """Numbers of the lines of `data` that hold `text`."""
    at = data.find(text)
    while at >= 0:
        number = bisect_right(starts, at) - 1
        yield number
        at = data.find(text, starts[number + 1])


def _classify_shape(shape: bytes, texts: list[bytes], index: PatternIndex) -> LineShape:
    """What a shape shows that holds `texts`."""
    patterns = tuple(entry for text in texts for entry in index.by_text.get(text, ()))
    may_exit = any(text in texts for text in _EXIT_TEXTS)
    is_block = ROOT_CAUSE in texts
    is_done = any(text in shape for text in _DONE_TEXTS)
    is_progress = is_done or _is_step_report(shape)
    if not patterns and not may_exit and not is_block:
        return LineShape(is_progress=is_progress, is_done=is_done) if is_progress else UNINTERESTING
    if is_quoted(shape):
        return UNINTERESTING
    return LineShape(patterns, may_exit, is_block, is_progress, is_done)
