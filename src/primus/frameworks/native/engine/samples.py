"""The text sample that the trained model generates."""

from __future__ import annotations

import time
from collections.abc import Collection

from primus.callback import Callback
from primus.config.schema import Trainer
from primus.data.training.dataset import Datasets
from primus.errors import UsageError
from primus.frameworks.native.engine.model import Transformer
from primus.runs.files import write_text
from primus.session.session import Session

TEMPERATURE = 0.8
"""Temperature below 1, so that a small model generates its likelier tokens."""


class TextSampler(Callback):
    """Generates a text after the last step, prints it and keeps it in `report/sample.txt`.

    Args:
        session: The run; every process takes part, because the model may be sharded.
        model: That is trained.
    """

    def __init__(self, session: Session, model: Transformer) -> None:
        self._session, self._model = session, model

    def after_train(self) -> None:
        session = self._session
        config = session.trainer.logging
        if not config.sample_tokens:
            return
        started = time.monotonic()
        text = generate_sample(self._model, session.data, session.trainer)
        if text is None:
            return
        session.reporter.print_line(f"sample of {config.sample_tokens} tokens:\n{text}")
        if session.processes.is_first:
            write_text(session.attempt.run.directory / "report" / "sample.txt", text + "\n")
            session.attempt.event("sample", tokens=config.sample_tokens, time_s=time.monotonic() - started)


def generate_sample(model: Transformer, data: Datasets, trainer: Trainer) -> str | None:
    """The prompt and its continuation by the model; None if the tokenizer of the data is not known.

    After fine-tuning on conversations, the prompt is a question in the chat template, and the answer ends a turn.

    If the model is sharded, every process must call this.
    """
    if data.tokenizer_path is None:
        return None
    if model.layout.pipeline.size > 1:
        return "none: the layers are on several pipeline stages"
    # After the last step, and only with a tokenizer: the start does without them.
    from primus.data.tokenizers.load import load_tokenizer
    from primus.frameworks.native.engine.post_training.generate import Sampling, generate

    config, sampling = trainer.logging, Sampling(TEMPERATURE, seed=trainer.training.seed)

    def continue_text(prompt: list[int], ends: Collection[int] = ()) -> list[int]:
        # The last part of a prompt that is longer than what the context has room for.
        prompt = prompt[-max(model.spec.max_position_embeddings - config.sample_tokens, 1) :]
        return generate(model, [prompt], config.sample_tokens, sampling, ends).completions[0].tokens

    if trainer.data.sft_data_path:
        from primus.data.instruction.encode import ExampleEncoder
        from primus.data.instruction.examples import read_examples

        encoder = ExampleEncoder(data.tokenizer_path)
        source = data.mask_reports[0].source
        try:
            question = encoder.encode_prompt(next(read_examples(source)), config.sample_prompt)
        except UsageError as error:  # such as a template that demands a system message
            return f"none: {error.problem}"
        text, prompt, ends = question
        return text + encoder.tokenizer.decode(continue_text(prompt, ends))
    tokenizer = load_tokenizer(data.tokenizer_path)
    prompt = tokenizer.encode(config.sample_prompt)
    if data.eod_id is not None and model.documents is None:
        prompt = [data.eod_id, *prompt]  # a document begins after the end of another
    if not prompt:
        return None
    return config.sample_prompt + tokenizer.decode(continue_text(prompt))
