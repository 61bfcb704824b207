"""Tasks of lm-evaluation-harness, answered by a model of native."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from primus.errors import PrimusError, UnfitError, UsageError
from primus.model_source.text_model import AnswerStyle, TextModel

MOST_NEW_TOKENS = 256
"""Tokens of an answer, where a task does not say it, as in the harness's own models."""


def measure_tasks(
    model: TextModel, tasks: Sequence[str], include_path: str | None, limit: int | None, batch_size: int
) -> dict[str, dict[str, float]]:
    """The metrics of each task.

    Args:
        model: The checkpoint.
        tasks: As the harness names them.
        include_path: Folder with YAML files of further tasks.
        limit: Documents of each task; all when None.
        batch_size: Texts that are computed at once.

    Raises:
        UnfitError: lm-evaluation-harness is not installed.
        UsageError: A task does not exist.
        PrimusError: A task fails, for example because its data cannot be downloaded.
    """
    try:
        from lm_eval import evaluator
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UnfitError(
            f"--tasks needs lm-evaluation-harness, which cannot be imported: {error}",
            f"{sys.executable} -m pip install lm-eval",
        ) from None
    # The harness's own tasks are thousands of files: read only where they are asked for.
    known = TaskManager(include_path=include_path, include_defaults=False)
    if not all(known.match_tasks([name]) for name in tasks):
        known = TaskManager(include_path=include_path)
    unknown = [name for name in tasks if not known.match_tasks([name])]
    if unknown:
        raise UsageError(f"--tasks: no task {unknown[0]} in lm-evaluation-harness", "list them by: lm-eval ls tasks")
    try:
        done = evaluator.simple_evaluate(
            _build_model(model, batch_size), tasks=list(tasks), limit=limit, task_manager=known, log_samples=False
        )
    except PrimusError:
        raise
    except Exception as error:  # of the harness, of datasets, of the hub
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise PrimusError(f"lm-evaluation-harness: {reason}", "--debug shows where") from error
    return {name: _select_numbers(metrics) for name, metrics in done["results"].items()}


def _select_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a task, whose names are ``METRIC,FILTER`` in the harness."""
    return {
        key.removesuffix(",none").replace(",", " "): float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and key != "sample_len"
    }


def _build_model(model: TextModel, batch_size: int) -> Any:
    """The model as the harness asks one."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = model.encoder.tokenizer
    length = model.opened.spec.max_position_embeddings

    class HarnessModel(TemplateLM):  # type: ignore[misc]
        """Log-likelihoods and greedy answers of a model."""

        @property
        def eot_token_id(self) -> int:
            return model.ends[0] if model.ends else tokenizer.eod_id or 0

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_id is None else tokenizer.bos_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return tokenizer.encode(string) if add_special_tokens is False else model.encode_text(string)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            # A text that is too long loses its beginning.
            rows = [([*context, *answer][-length - 1 :], len(answer)) for _, context, answer in requests]
            order = sorted(range(len(rows)), key=lambda place: len(rows[place][0]))  # a batch has little padding
            found: dict[int, tuple[float, bool]] = {}
            for places in (order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)):
                texts = [rows[place][0] for place in places]
                counted = [
                    [number >= len(text) - rows[place][1] for number in range(len(text))]
                    for text, place in zip(texts, places, strict=True)
                ]
                for place, score in zip(places, model.native.score(texts, counted), strict=True):
                    found[place] = float(score.log_probabilities.sum()), bool(score.is_likeliest.all())
            return [found[place] for place in range(len(rows))]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            texts = [request.args[0] for request in requests]
            return [sum(each for each, _ in self._loglikelihood_tokens(list(self._cut_text(text)))) for text in texts]

        def _cut_text(self, text: str) -> Iterator[tuple[str, list[int], list[int]]]:
            windows = get_rolling_token_windows(self.tok_encode(text, False), self.prefix_token_id, length, 1)
            return (("", *make_disjoint_window(window)) for window in windows)

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            found: list[str] = []
            # A task asks all of its texts in one way, so that these are whole batches.
            for wanted, group in groupby(requests, lambda request: json.dumps(request.args[1], sort_keys=True)):
                texts, style = [request.args[0] for request in group], _read_style(json.loads(wanted))
                for begin in range(0, len(texts), batch_size):
                    found += [each.text for each in model.answer(texts[begin : begin + batch_size], style, begin)]
            return found

    return HarnessModel()


def _read_style(wanted: Mapping[str, Any]) -> AnswerStyle:
    until = wanted.get("until") or []
    most = wanted.get("max_gen_toks") or wanted.get("max_new_tokens") or MOST_NEW_TOKENS
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    temperature = wanted.get("temperature", 0.0) if wanted.get("do_sample") else 0.0
    return AnswerStyle(most, temperature=temperature, stops=stops)
