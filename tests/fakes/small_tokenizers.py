"""Small tokenizers with the patterns of the large ones, and texts that trouble them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st

from primus.data.tokenizers.cuts import PATTERNS
from primus.data.tokenizers.load import parse_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer

CORPUS = (
    "x.\ny.\nz.\n\nq!\n/\n a  b 'll d's \n\n" * 8,
    "The quick brown fox doesn't jump; it's lazy.\n\n  They'll say WE'VE 1234567 reasons...\r\n",
    "def main(argv: list[str]) -> int:\n    return len(argv)  # \t done\n",
    "日本語のテキストです。한국어 텍스트 русский текст, ελληνικά עברית العربية हिन्दी ไทย\n",
    "cafe\u0301 na\u00efve \u212b \U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea x\u0302\u0302 \u00a0\u2003\u3000",
)
FRAGMENTS = (
    *(
        "'s",
        "'S",
        "'ll",
        "'LL",
        "'Ve",
        "'re",
        "'",
        "\u2019s",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        " \n",
        "\u00a0",
        "\u3000",
        "\x85",
    ),
    *(
        "a",
        "B",
        "the",
        "The",
        "doesn't",
        "fooBar",
        "1",
        "12",
        "1234",
        "\u00bd",
        "\u2167",
        "\uff11",
        ".",
        "...",
        "!?",
        "/",
        "-/\n",
    ),
    *(
        "\u0301",
        "e\u0301",
        "\u00e9",
        "\u212b",
        "\u1100\u1161",
        "\uac00",
        "\u0bcd",
        "\u200d",
        "\u0345",
        "\u0f73",
        "\u2126",
    ),
    *(
        "\U0001f469\u200d\U0001f4bb",
        "\U0001f1e9",
        "\ufe0f",
        "\x00",
        "\x1c",
        "\x1f",
        "\x7f",
        "\ufeff",
        "\ufffd",
        "\u2028",
        "\u180e",
    ),
    *(
        "\u65e5\u672c\u8a9e",
        "\u3002",
        "\u0939\u093f",
        "\u0e44\u0e17\u0e22",
        "\u01c5",
        "\u02b0",
        "\u00aa",
        "\U0001e900",
        "\U00016e40",
    ),
    *("<|endoftext|>", "<|", "|>", "<think>", "</s>", "<s>", "\u2581", "<0x0A>", "<unk>"),
)
texts = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)), max_size=25
).map("".join)
"""Whitespace, contractions, digits, marks, emojis, special tokens and anything else."""


DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
)
"""Patterns of DeepSeek V3, one after the other."""


def trained(
    patterns: Sequence[str], vocab_size: int = 600, normalizer: Any = None, special: tuple[str, ...] = ()
) -> Tokenizer:
    """A byte-level BPE that splits by patterns one after the other, or as GPT-2 without any."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(False, use_regex=not splits)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level]) if splits else byte_level
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return parse_tokenizer(backend.to_str().encode(), "trained", "<|endoftext|>")


def changed(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    """A tokenizer with other parts in its tokenizer.json."""
    described = json.loads(tokenizer.content) | parts
    return parse_tokenizer(json.dumps(described).encode(), "changed", "<|endoftext|>")


@cache
def by_pattern() -> dict[str, Tokenizer]:
    """A tokenizer of each pattern, that of Qwen with its normalizer and a token that is not special."""
    from tokenizers import normalizers

    made = {name: trained([pattern]) for name, pattern in PATTERNS.items() if name != "gpt2"}
    made |= {"gpt2": trained([]), "deepseek": trained(DEEPSEEK)}
    qwen = trained([PATTERNS["qwen2"]], normalizer=normalizers.NFC(), special=("<think>",))
    added = json.loads(qwen.content)["added_tokens"]
    added[1]["special"] = False
    return made | {"qwen2": changed(qwen, added_tokens=added)}


@cache
def sentencepiece_model(byte_fallback: bool = True, kind: str = "bpe", own: str = "") -> bytes:
    """A SentencePiece model like that of Llama 2, with a piece of the user's own where `own` is given."""
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS * 3 for line in text.splitlines()),
        model_writer=made,
        model_type=kind,
        vocab_size=500,
        byte_fallback=byte_fallback,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=[own] if own else [],
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    return made.getvalue()
