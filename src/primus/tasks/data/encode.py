"""Tokenize text into Megatron .bin/.idx files; also accepts the options of Megatron-LM's preprocess_data.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from msgspec import structs

from primus.data.encode.options import EncodeOptions, check_packages, make_job, output_prefix, summarize_prepared
from primus.errors import UsageError, did_you_mean
from primus.task import TaskContext

SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
WITH_MODEL = ("HuggingFaceTokenizer", "TikTokenizer", *SENTENCE_PIECE)
WITH_FILES = ("GPT2BPETokenizer",)

NO_EFFECT = (
    "partitions",
    "keep_sequential_samples",
    "tokenizer_hf_no_include_special_tokens",
    "tokenizer_hf_no_use_fast",
    "make_vocab_size_divisible_by",
    "log_interval",
)
"""Options of Megatron-LM's script that change no token here."""


class Options(EncodeOptions, frozen=True, kw_only=True):
    """Options of `data encode`."""

    output_prefix: str | None = None
    """Like --output, but documents get an end-of-document token only with --append-eod, as in Megatron-LM."""
    tokenizer_type: str | None = None
    """Tokenizer type in Megatron-LM, such as HuggingFaceTokenizer or GPT2BPETokenizer."""
    tokenizer_model: str | None = None
    """Same as --tokenizer."""
    vocab_file: str | None = None
    """vocab.json of a GPT-2 tokenizer, with --merge-file."""
    merge_file: str | None = None
    """merges.txt of a GPT-2 tokenizer, with --vocab-file."""
    split_sentences: bool = False
    """Split documents into sentences with nltk's Punkt; each is a sequence. The files are PREFIX_text_sentence."""
    keep_newlines: bool = False
    """With --split-sentences: keep white space between sentences."""
    lang: str | None = None
    """With --split-sentences: language of the text; default: english."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """With --tokenizer-type TikTokenizer: split pattern; default: v2."""
    partitions: int | None = None
    """No effect: the input is always divided into shards."""
    keep_sequential_samples: bool = False
    """No effect: documents keep the order of the input unless --shuffle is given."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """No effect: without --add-special-tokens, the tokenizer's template is not applied."""
    tokenizer_hf_no_use_fast: bool = False
    """No effect: the tokenizer's file defines the tokens."""
    make_vocab_size_divisible_by: int | None = None
    """No effect: it is a model setting."""
    log_interval: int | None = None
    """No effect: the terminal shows the progress."""


def run(options: Options, context: TaskContext) -> None:
    """Tokenize.

    Raises:
        PrimusError: See `primus.data.encode.job.prepare_token_files`.
    """
    if not options.input:
        raise UsageError("nothing to encode", "give --input PATH...")
    if bool(options.output) == bool(options.output_prefix):
        raise UsageError("two outputs" if options.output else "no output", "give --output PREFIX")
    tokenizer = _choose_tokenizer_name(options)
    check_packages("data encode")
    from primus.data.encode.job import prepare_token_files
    from primus.data.shards.display import ProgressDisplay

    if not options.split_sentences and (options.keep_newlines or options.lang):
        name = "--keep-newlines" if options.keep_newlines else "--lang"
        raise UsageError(f"{name} without --split-sentences", "give --split-sentences too, or remove it")
    output = output_prefix(options.output or options.output_prefix or "")
    job = make_job(options, output, tokenizer)
    recipe = structs.replace(
        job.recipe,
        append_eod=not options.output_prefix if options.append_eod is None else options.append_eod,
        split_sentences=(options.lang or "english") if options.split_sentences else None,
        keep_newlines=options.keep_newlines,
    )
    follows = _follows_megatron(options) and options.tokenizer_type not in SENTENCE_PIECE
    job = replace(job, recipe=recipe, follow_declared=follows)
    with ProgressDisplay() as display:
        for name in NO_EFFECT:
            if getattr(options, name) not in (None, False):
                display.print_line(f"--{name.replace('_', '-')} has no effect here")
        prepared = prepare_token_files(job, display.print_line, display.show_progress)
    values = [summarize_prepared(each) for each in prepared]
    context.result(values, "\n".join(f"--train_data_path {value['prefix']}" for value in values))


def _follows_megatron(options: Options) -> bool:
    """Whether any option of Megatron-LM's script is given that has another name here."""
    names = ("output_prefix", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    return any(getattr(options, name) for name in names)


def _choose_tokenizer_name(options: Options) -> str:
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
    if options.tiktoken_pattern and kind != "TikTokenizer":
        raise UsageError("--tiktoken-pattern", "it requires --tokenizer-type TikTokenizer")
    return f"tiktoken:v1:{given[0]}" if options.tiktoken_pattern == "v1" else given[0]
