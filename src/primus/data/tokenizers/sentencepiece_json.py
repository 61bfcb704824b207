"""A tokenizer.json with the ids of a SentencePiece model, for transformers and servers, which read no other rules.

transformers builds a tokenizer from the pieces of a model alone, by the rules of Llama 2: models with other rules
(unigram, normalization, white space) get other ids there. Fields: sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from primus.data.tokenizers.fast import PROBES
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import PrimusError
from primus.protobuf import read_fields

PIECES, TRAINER, NORMALIZER = 1, 2, 3
MODEL_TYPE, BYTE_FALLBACK = 3, 35
CHARACTER_MAP, ADD_DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES = 2, 3, 4
BPE = 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "\u2581"


class VocabularyPiece(NamedTuple):
    """A piece of the vocabulary."""

    text: str
    score: float
    kind: int


def build_tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """The tokenizer.json of a SentencePiece model.

    Raises:
        PrimusError: The rules of the package tokenizers give other ids.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, processors

    fields = dict(read_fields(tokenizer.content))  # of repeated fields, the last one
    trainer, normalizer = (dict(read_fields(_read_bytes(fields, number))) for number in (TRAINER, NORMALIZER))
    pieces = [_parse_piece(value) for number, value in read_fields(tokenizer.content) if number == PIECES]
    built = tokenizers.Tokenizer(_build_model(pieces, trainer))
    built.normalizer = _build_normalizer(normalizer)
    has_prefix = bool(normalizer.get(ADD_DUMMY_PREFIX, True))
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    built.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    for piece in pieces:
        if piece.kind in (UNKNOWN, CONTROL):
            built.add_special_tokens([AddedToken(piece.text, normalized=False, special=True)])
        elif piece.kind == USER_DEFINED:
            built.add_tokens([AddedToken(piece.text, normalized=False)])
    # A text that spells out a piece for a byte, or a control piece, is that piece here, and plain text there.
    texts = [text for text in PROBES if "<0x" not in text]
    texts += [f" {text}  {text}" for text in texts]
    texts += [f"a {piece.text} b{piece.text}" for piece in pieces if piece.kind == USER_DEFINED][:100]
    rows = built.encode_batch(texts, add_special_tokens=False)
    if [row.ids for row in rows] != [tokenizer.encode(text) for text in texts]:
        raise PrimusError(
            f"{tokenizer.name}: no tokenizer.json gives the ids of this SentencePiece model",
            "name a tokenizer.json for it by --tokenizer",
        )
    if tokenizer.bos_id is not None:
        begin = pieces[tokenizer.bos_id].text
        built.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.bos_id)]
        )
    return built.to_str(pretty=True).encode()


def _read_bytes(fields: dict[int, Any], number: int) -> bytes:
    value = fields.get(number, b"")
    assert isinstance(value, bytes)
    return value


def _parse_piece(message: Any) -> VocabularyPiece:
    fields = dict(read_fields(message))
    (score,) = struct.unpack("<f", _read_bytes(fields, 2) or bytes(4))
    return VocabularyPiece(_read_bytes(fields, 1).decode(), score, int(fields.get(3, NORMAL)))


def _build_model(pieces: list[VocabularyPiece], trainer: dict[int, Any]) -> Any:
    from tokenizers import models

    has_bytes = bool(trainer.get(BYTE_FALLBACK, False))
    unknown = next((number for number, piece in enumerate(pieces) if piece.kind == UNKNOWN), None)
    if trainer.get(MODEL_TYPE, 1) != BPE:
        return models.Unigram([(piece.text, piece.score) for piece in pieces], unknown, has_bytes)
    vocabulary = {piece.text: number for number, piece in enumerate(pieces)}
    merges = sorted(_list_merges(pieces, vocabulary))
    return models.BPE(
        vocabulary,
        [(left, right) for _, _, left, right in merges],
        unk_token=None if unknown is None else pieces[unknown].text,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )


def _list_merges(pieces: list[VocabularyPiece], vocabulary: dict[str, int]) -> Iterator[tuple[float, int, str, str]]:
    """All pairs of pieces that are a piece together: SentencePiece merges the one with the highest score first."""
    for number, piece in enumerate(pieces):
        if piece.kind != NORMAL:
            continue
        for place in range(1, len(piece.text)):
            left, right = piece.text[:place], piece.text[place:]
            if left in vocabulary and right in vocabulary:
                yield -piece.score, number, left, right


def _build_normalizer(fields: dict[int, Any]) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if characters := _read_bytes(fields, CHARACTER_MAP):
        steps.append(normalizers.Precompiled(characters))
    if fields.get(REMOVE_EXTRA_WHITESPACES, True):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if fields.get(ADD_DUMMY_PREFIX, True):
        steps.append(normalizers.Prepend(" "))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
