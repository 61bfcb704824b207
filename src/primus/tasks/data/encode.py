"""Tokenize text into Megatron .bin/.idx files; takes the options of Megatron-LM's preprocess_data.py too."""

from __future__ import annotations

from primus.data.encoding.options import EncodeOptions, check_packages, make_job, output_prefix, summary
from primus.errors import UsageError, did_you_mean
from primus.task import TaskContext

SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
WITH_MODEL = ("HuggingFaceTokenizer", "TikTokenizer", *SENTENCE_PIECE)
WITH_FILES = ("GPT2BPETokenizer",)


class Options(EncodeOptions, frozen=True, kw_only=True):
    """Options of `data encode`."""

    output_prefix: str | None = None
    """The same as --output, but without --append-eod documents have no end, as in Megatron-LM."""
    tokenizer_type: str | None = None
    """Megatron-LM's name of a kind of tokenizer, such as HuggingFaceTokenizer or GPT2BPETokenizer."""
    tokenizer_model: str | None = None
    """The same as --tokenizer."""
    vocab_file: str | None = None
    """vocab.json of a GPT-2 tokenizer, with --merge-file."""
    merge_file: str | None = None
    """merges.txt of a GPT-2 tokenizer, with --vocab-file."""
    partitions: int | None = None
    """No effect: the work is always divided."""
    log_interval: int | None = None
    """No effect: a terminal shows how far it is."""


def run(options: Options, context: TaskContext) -> None:
    """Tokenize.

    Raises:
        PrimusError: See `primus.data.encoding.prepare.prepare`.
    """
    if not options.input:
        raise UsageError("nothing to encode", "give --input PATH...")
    if bool(options.output) == bool(options.output_prefix):
        raise UsageError("two outputs" if options.output else "no output", "give --output PREFIX")
    tokenizer = _tokenizer(options)
    check_packages("data encode")
    from primus.data.encoding.prepare import prepare
    from primus.data.pipeline.display import Display

    output = output_prefix(options.output or options.output_prefix or "")
    job = make_job(
        options,
        output,
        tokenizer,
        append_eod=not options.output_prefix,
        follow_declared=_follows_megatron(options) and options.tokenizer_type not in SENTENCE_PIECE,
    )
    with Display() as display:
        for name in ("partitions", "log_interval"):
            if getattr(options, name) is not None:
                display.say(f"--{name.replace('_', '-')} has no effect here")
        prepared = prepare(job, display.say, display.show)
    values = [summary(each) for each in prepared]
    context.result(values, "\n".join(f"--train_data_path {value['prefix']}" for value in values))


def _follows_megatron(options: Options) -> bool:
    """Whether any option of Megatron-LM's script is given that has another name here."""
    names = ("output_prefix", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    return any(getattr(options, name) for name in names)


def _tokenizer(options: Options) -> str:
    """Name of the tokenizer that Megatron-LM's options mean, or our own.

    Raises:
        UsageError: There is none, or more than one.
    """
    kind = options.tokenizer_type
    if kind and kind not in WITH_MODEL + WITH_FILES:
        raise UsageError(f"--tokenizer-type {kind}", did_you_mean(kind, WITH_MODEL + WITH_FILES))
    files = f"{options.vocab_file},{options.merge_file}" if options.vocab_file or options.merge_file else None
    if files and not (options.vocab_file and options.merge_file):
        raise UsageError("one of --vocab-file and --merge-file", "a GPT-2 tokenizer needs both")
    given = [name for name in (options.tokenizer, options.tokenizer_model, files) if name]
    if len(given) > 1:
        raise UsageError(f"several tokenizers: {', '.join(given)}", "give one")
    if not given:
        files_needed = kind in WITH_FILES
        raise UsageError(
            "no tokenizer",
            "give --vocab-file and --merge-file" if files_needed else "give --tokenizer PATH, a hub name or bpe:VOCAB",
        )
    return given[0]
