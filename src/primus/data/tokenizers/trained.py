"""Train byte-level BPE tokenizers."""

from __future__ import annotations

from collections.abc import Iterable

from primus.data.tokenizers.document_ends import END_OF_TEXT
from primus.data.tokenizers.load import parse_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import UsageError

SMALLEST_BPE = 257
"""256 bytes and the end-of-document token."""


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE like GPT-2's; the same texts in the same order give the same tokenizer.

    Args:
        texts: Texts to train on; their distinct words are held in memory.
        vocab_size: Maximum number of tokens, including ``<|endoftext|>`` and the 256 bytes.

    Raises:
        UsageError: `vocab_size` is smaller than `SMALLEST_BPE`.
    """
    if vocab_size < SMALLEST_BPE:
        raise UsageError(f"a byte-level BPE of {vocab_size} tokens", f"it needs at least {SMALLEST_BPE}")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return parse_tokenizer(backend.to_str(pretty=True).encode(), f"bpe:{vocab_size}", END_OF_TEXT)
