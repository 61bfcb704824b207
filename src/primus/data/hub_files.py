"""The files by which transformers loads a tokenizer and generates text, from those of any tokenizer.

AutoTokenizer builds a tokenizer by the class in tokenizer_config.json; without that, by the model's class, whose rules
may split a text otherwise than tokenizer.json says. `generate`, and servers, stop at the ids in generation_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from primus.data.instruction.chat_template import read_chat_template
from primus.data.instruction.encode import find_turn_end
from primus.data.tokenizers import sentencepiece_json
from primus.data.tokenizers.load import load_tokenizer
from primus.data.tokenizers.sibling_files import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    get_token,
    open_siblings,
)
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.data.tokenizers.tokenizer_json import TokenizerJson

OPTIONAL_FILES = (
    *(TOKENIZER_CONFIG, SPECIAL_TOKENS, "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("spiece.model", "sentencepiece.bpe.model", CHAT_TEMPLATE, GENERATION_CONFIG),
)
MODEL_DOCUMENTS = ("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
"""Of a published model; they describe its weights as they were published."""
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Class of transformers that takes a tokenizer.json as it is."""

HubFiles = Mapping[str, bytes]
"""Content of files by name."""


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer, whole or damaged."""
    return any(any(folder.glob(name)) for name in ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json"))


class TokenizerFiles:
    """A tokenizer with the files next to it.

    Args:
        name: As `load_tokenizer` takes it.

    Raises:
        UsageError: The tokenizer does not exist or is damaged.
        PrimusError: The hub cannot be reached.
    """

    def __init__(self, name: str) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(name, fast=False, follow_declared=True)
        self.others: HubFiles = {}
        path = Path(name).expanduser()
        # A file of another name is not of the folder that it is in, such as the one next to token files.
        is_in_folder = path.is_dir() or path.name in ("tokenizer.json", "tokenizer.model")
        if is_in_folder or not (path.exists() or "," in name or ":" in name):
            read = open_siblings(name)
            self.others = {file: content for file in OPTIONAL_FILES if (content := read(file)) is not None}

    def build_files(self, others: HubFiles, max_length: int | None, *, ends_turns: bool) -> HubFiles:
        """All files that transformers needs, those that exist as they are.

        Args:
            others: Files from elsewhere for the same tokenizer, for what is absent next to it.
            max_length: Longest text of the model, for a tokenizer_config.json that is absent.
            ends_turns: Whether the model was trained on conversations, so that generation stops at the end of a turn.

        Raises:
            PrimusError: transformers has no tokenizer with the ids of this one.
        """
        files = {**others, **self.others, f"tokenizer{self.tokenizer.file_suffix}": self.tokenizer.content}
        given, special, generation = (
            json.loads(files.get(name, b"{}")) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS, GENERATION_CONFIG)
        )
        vocabulary = _read_vocabulary(self.tokenizer)
        tokens = _choose_special_tokens({**special, **given}, self.tokenizer, vocabulary)
        config = given if "tokenizer_class" in given else _complete_config(given, self.tokenizer, tokens, max_length)
        if self.tokenizer.file_suffix == ".model" and "tokenizer_class" not in given:
            files["tokenizer.json"] = sentencepiece_json.build_tokenizer_json(self.tokenizer)
        files[TOKENIZER_CONFIG] = _encode_changed(config, files.get(TOKENIZER_CONFIG))
        template = read_chat_template(files.get, self.tokenizer.name) if ends_turns or not generation else None
        turn_end = find_turn_end(template, self.tokenizer.special_strings) if template else ""
        ids = {name: vocabulary[token] for name, token in tokens.items() if token in vocabulary}
        completed = _complete_generation(generation, ids, vocabulary.get(turn_end))
        files[GENERATION_CONFIG] = _encode_changed(completed, files.get(GENERATION_CONFIG))
        return files


def _read_vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    if tokenizer.file_suffix == ".json":
        return TokenizerJson.decode(tokenizer.content).collect_vocabulary()
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=tokenizer.content)
    return {processor.id_to_piece(number): number for number in range(tokenizer.vocab_size)}


def _choose_special_tokens(
    declared: Mapping[str, object], tokenizer: Tokenizer, vocabulary: Mapping[str, int]
) -> dict[str, str]:
    """The tokens `bos`, `eos` and `pad`: declared ones, or those that the vocabulary is known for.

    As in GPT-2, a text begins behind the end of another one where no token begins it, and any token may pad what is
    masked.
    """
    end = get_token(declared.get("eos_token")) or tokenizer.eod
    begin = next((token for token, number in vocabulary.items() if number == tokenizer.bos_id), end)
    found = {"bos": begin, "eos": end, "pad": end}
    return {
        name: chosen for name, known in found.items() if (chosen := get_token(declared.get(f"{name}_token")) or known)
    }


def _complete_config(
    config: Mapping[str, object], tokenizer: Tokenizer, tokens: Mapping[str, str], max_length: int | None
) -> Mapping[str, object]:
    """tokenizer_config.json of a tokenizer without a class."""
    return {
        "tokenizer_class": TOKENIZER_CLASS,
        "clean_up_tokenization_spaces": False,
        **({} if max_length is None else {"model_max_length": max_length}),
        **{f"{name}_token": token for name, token in tokens.items()},
        **config,
    }


def _complete_generation(
    generation: Mapping[str, object], ids: Mapping[str, int], turn_end: int | None
) -> Mapping[str, object]:
    """generation_config.json with the ids of special tokens, and of the end of a turn."""
    values = dict(generation)
    if "eos_token_id" not in values:  # one that has it is as its authors want it
        values = {f"{name}_token_id": number for name, number in ids.items()} | values
    given = values.get("eos_token_id")
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if turn_end is not None and turn_end not in ends:
        values["eos_token_id"] = [*ends, turn_end] if ends else turn_end
    return values


def _encode_changed(values: Mapping[str, object], before: bytes | None) -> bytes:
    """A JSON file, byte by byte the one before if it says the same."""
    if before is not None and json.loads(before) == values:
        return before
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
