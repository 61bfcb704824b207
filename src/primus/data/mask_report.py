"""What counts in the loss of instruction data, and what is wrong with it."""

from __future__ import annotations

from msgspec import Struct


class MaskProblem(Struct, frozen=True, kw_only=True):
    """Why training on data would not teach what its owner wants."""

    problem: str
    hint: str
    """What to do."""


class MaskReport(Struct, frozen=True, kw_only=True):
    """What counts in the loss of a file of instruction data."""

    source: str
    """The file, or its name on the hub."""
    examples: int
    """Rows; of pairs, answers."""
    tokens: int
    """Tokens of all examples, before any is cut."""
    counted_tokens: int
    """Those that count in the loss."""
    lost_answers: int
    """Answers that do not count because the chat template shortens them when later messages follow."""
    cut_examples: int
    """Examples of which a counted token is cut or that are dropped, because they are longer than seq_length."""
    dropped_examples: int
    """Those of them of which nothing is left."""
    problems: tuple[MaskProblem, ...]
    """Reasons to refuse the data."""
    notes: tuple[str, ...]
    """What is worth knowing."""

    def list_notes(self) -> list[str]:
        """The notes with the name of the source."""
        return [f"{self.source}: {note}" for note in self.notes]
