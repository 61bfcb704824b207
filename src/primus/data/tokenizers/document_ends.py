"""Find the end-of-document token that the files next to a tokenizer declare, like Megatron-LM's HuggingFaceTokenizer.

Megatron-LM uses the ``eos_token`` of `transformers` (megatron/core/tokenizers/text/libraries/huggingface_tokenizer.py).
`transformers` reads it from ``tokenizer_config.json`` and ``special_tokens_map.json``; the latter takes precedence if
the former has no ``added_tokens_decoder``, which is the case in old versions. If neither declares a token, the
tokenizer's class has a default (`_from_pretrained` in transformers/tokenization_utils_base.py). If the class has none,
the ids in ``generation_config.json`` and ``config.json`` decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET

from primus.data.tokenizers.sibling_files import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    ReadFile,
    SiblingConfig,
    get_token,
    read_config,
)
from primus.errors import UsageError, did_you_mean

END_OF_TEXT = "<|endoftext|>"
END_OF_DOCUMENT = (
    END_OF_TEXT,  # GPT-2, Qwen, Phi, gpt-oss
    "<|end_of_text|>",  # Llama 3
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "</s>",  # Llama 2, Mistral, Mixtral
    "<eos>",  # Gemma
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)
"""Tokens that end a document, in order of precedence (from tokenizer_config.json of these models)."""

BEGIN_OF_DOCUMENT = (
    "<|begin_of_text|>",  # Llama 3
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<s>",  # Llama 2, Mistral, Mixtral
    "<bos>",  # Gemma
    "<|startoftext|>",  # gpt-oss
    "[BOS]",
    "[CLS]",
)
"""Tokens that begin a document, in order of precedence."""

CLASS_TOKENS = {
    "bloom": "</s>",
    "codegen": "<|endoftext|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "gemma": "<eos>",
    "gpt2": "<|endoftext|>",
    "gptneox": "<|endoftext|>",
    "qwen2": "<|endoftext|>",
    "roberta": "</s>",
    "t5": "</s>",
}
"""Default ``eos_token`` of transformers' classes, such as Qwen2TokenizerFast, if no file declares one.

Llama's class is not listed: its default differs between major versions, so the ids of the model are used.
"""

MODEL_CLASSES = {"qwen3": "qwen2", "qwen2_moe": "qwen2", "qwen3_moe": "qwen2", "gpt_neox": "gptneox", "gemma2": "gemma"}
"""Tokenizer class by ``model_type`` of config.json, if the names differ (AutoTokenizer of transformers)."""


@dataclass(frozen=True)
class DeclaredEnd:
    """A declared end-of-text token and its source."""

    source: str
    """Path or name of the file that declares the token."""
    token: str | None = None
    """The token, if the file has it as text."""
    token_id: int | None = None
    """Id of the token, if the file has only the id."""

    def find_token(self, vocabulary: dict[str, int]) -> str | None:
        """The token, if the vocabulary has it."""
        if self.token is not None:
            return self.token if self.token in vocabulary else None
        return next((token for token, number in vocabulary.items() if number == self.token_id), None)

    def __str__(self) -> str:
        return f"token {self.token_id}" if self.token is None else self.token


@dataclass(frozen=True)
class EndChoice:
    """How to choose the end-of-document token."""

    asked: str | None = None
    """The token that the user requests."""
    declared: DeclaredEnd | None = None
    """The token that the files next to the tokenizer declare."""
    follow: bool = False
    """Whether the declared token takes precedence over a well-known token of the vocabulary, as in Megatron-LM."""


def find_declared(read: ReadFile, where: str) -> DeclaredEnd | None:
    """Find the token that the files next to a tokenizer declare; None if they declare none.

    Args:
        read: Returns the content of a file by name.
        where: Folder or name on the hub, for messages.

    Raises:
        UsageError: A file is damaged.
    """
    tokenizer, special = (read_config(read, where, name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS))
    sources = [(f"{where}/{TOKENIZER_CONFIG}", tokenizer), (f"{where}/{SPECIAL_TOKENS}", special)]
    if tokenizer.added_tokens_decoder is UNSET:
        sources.reverse()
    ends = [DeclaredEnd(source, token) for source, config in sources if (token := get_token(config.eos_token))]
    if not ends and tokenizer.eos_token is UNSET:
        ends += _list_defaults_of_class(tokenizer, read_config(read, where, MODEL_CONFIG), where)
    # Megatron-LM uses the separator without an end token.
    ends += [DeclaredEnd(source, token) for source, config in sources if (token := get_token(config.sep_token))]
    if ends:
        return ends[0]
    for name in (GENERATION_CONFIG, MODEL_CONFIG):
        if (number := _read_first_id(read_config(read, where, name))) is not None:
            return DeclaredEnd(f"{where}/{name}", token_id=number)
    return None


def find_end_of_document(vocabulary: dict[str, int], end: EndChoice, name: str) -> str | None:
    """Choose the end-of-document token: the requested one, a well-known one in the vocabulary, or the declared one.

    Raises:
        UsageError: The vocabulary does not have the requested token.
    """
    if end.asked is None:
        declared = end.declared.find_token(vocabulary) if end.declared else None
        known = next((token for token in END_OF_DOCUMENT if token in vocabulary), None)
        return (declared or known) if end.follow else (known or declared)
    if end.asked not in vocabulary:
        special = [token for token in vocabulary if token.startswith(("<", "["))]
        raise UsageError(f"{name}: no token '{end.asked}' in this tokenizer", did_you_mean(end.asked, special[:200]))
    return end.asked


def find_begin_of_document(vocabulary: dict[str, int]) -> int | None:
    """Id of the first token of `BEGIN_OF_DOCUMENT` that the vocabulary has."""
    return next((vocabulary[token] for token in BEGIN_OF_DOCUMENT if token in vocabulary), None)


def _list_defaults_of_class(tokenizer: SiblingConfig, model: SiblingConfig, where: str) -> list[DeclaredEnd]:
    """Default token of the tokenizer's class, which the tokenizer's file or, without it, the model type determines."""
    name, kind = tokenizer.tokenizer_class, model.model_type
    if isinstance(name, str):
        token = CLASS_TOKENS.get(name.removesuffix("Fast").removesuffix("Tokenizer").lower())
        source = f"{where}/{TOKENIZER_CONFIG}, tokenizer_class {name}"
    else:
        token = CLASS_TOKENS.get(MODEL_CLASSES.get(kind, kind)) if isinstance(kind, str) else None
        source = f"{where}/{MODEL_CONFIG}, model_type {kind}"
    return [DeclaredEnd(source, token)] if token else []


def _read_first_id(config: SiblingConfig) -> int | None:
    """``eos_token_id`` of a model; the first one of a list, which ends a text (the others end a turn)."""
    value = config.eos_token_id
    if value is UNSET and isinstance(config.text_config, dict):
        value = config.text_config.get("eos_token_id")
    if isinstance(value, list):
        value = next(iter(value), None)
    return value if type(value) is int and value >= 0 else None
