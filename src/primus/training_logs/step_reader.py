"""The base of all readers of logs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from primus.training_logs.log_step import LogStep

if TYPE_CHECKING:
    from primus.training_logs.line_columns import ScannedBlock


class LogEvaluation(LogStep):
    """An evaluation: the values are its step and loss."""


class StepReader:
    """Reads the lines of one format; holds state between lines, so that each file has a reader.

    Subclasses say in `ANCHORS` which bytes each of their lines contains, and read such lines in `read_line`.
    """

    NAME: ClassVar[str]
    """The value of `--format` that chooses this reader."""
    TITLE: ClassVar[str]
    ANCHORS: ClassVar[tuple[bytes, ...]]
    """A line without any of them is not passed to `read_line`."""
    SETTING_ANCHORS: ClassVar[tuple[bytes, ...]] = ()
    """Further anchors, of lines before the first step."""
    PREFERS_LAST_RANK: ClassVar[bool] = False
    END: ClassVar[re.Pattern[bytes] | None] = None
    """The end of a line that is not cut off; None if the line does not show it."""
    MEMORY: ClassVar[str] = ""
    """The meaning of `memory_gib`."""
    PRECEDENCE: ClassVar[int] = 0
    """Priority: of several formats that read a log, the one with the highest number is taken."""
    FILE: ClassVar[str] = ""
    """Name of a file that `read_file` reads as a whole; empty if the framework writes none."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        """Settings of the run that the log prints."""

    @property
    def step_factor(self) -> float:
        """Steps between two records, where a log counts records instead of steps."""
        return 1.0

    @property
    def step_offset(self) -> float:
        """Steps before the first record, where a log counts records."""
        return 0.0

    @property
    def step_note(self) -> str:
        """What is not certain about the numbers of steps; empty if the log prints them."""
        return ""

    @classmethod
    def recognizes(cls, line: bytes) -> bool:
        """Whether a line with an anchor is of this format, where other formats have the same anchor."""
        return True

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        """The steps and evaluations that a line completes; none for other lines.

        Raises:
            LogLineError: A line of a step cannot be read.
        """
        raise NotImplementedError

    def scan_block(self, block: bytes) -> ScannedBlock | None:
        """The steps of a block of lines by column, and the lines that must be read one by one; None if all must."""
        return None

    @classmethod
    def read_file(cls, data: bytes) -> Iterable[LogStep]:
        """The steps and evaluations of a file with the name `FILE`.

        Raises:
            LogLineError: It is another file.
        """
        raise NotImplementedError

    def finish(self) -> Iterable[LogStep]:
        """The step that the end of the log completes."""
        return ()
