"""Records patch files with their content in the run folder while they are applied."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import structs

from primus.errors import PrimusError
from primus.plan import Action
from primus.redaction import redact_log_text
from primus.runs import patch_records
from primus.runs.patch_records import PatchRecord, State


class PatchRecorder:
    """Keeps a node's record of the patches up to date while they are applied; node 0 keeps copies, too.

    Args:
        directory: The run folder, or its stand-in until the rendezvous; None records nothing.
        node_rank: The node.
    """

    def __init__(self, directory: Path | None, node_rank: int) -> None:
        self._directory = directory
        self._node_rank = node_rank
        self._records: list[PatchRecord] = []

    def record_start(self, action: Action) -> None:
        """Record the patch that is about to run; secrets are removed from its copy.

        Raises:
            PrimusError: It cannot be read, or the copy cannot be written.
        """
        if self._directory is None:
            return
        try:
            content = Path(action.file).read_bytes()
        except OSError as error:
            raise PrimusError(f"patch {action.file}: cannot be read: {error.strerror}") from None
        text = content.decode("utf-8", "surrogateescape")
        shown = "\n".join(redact_log_text(line, assigned_only=True) for line in text.split("\n"))
        own_name = _own_name(Path(action.file))
        record = PatchRecord(
            file=own_name or action.file,
            name=f"{len(self._records)}_{own_name or Path(action.file).name}",
            sha256=patch_records.hash_patch(content),
            is_masked=shown != text,
        )
        # The copy is written before the record that refers to it, so that a killed launch leaves no dangling record.
        if self._node_rank == 0:
            patch_records.keep_copy(self._directory, record, shown.encode("utf-8", "surrogateescape"))
        self._records.append(record)
        patch_records.write_records(self._directory, self._node_rank, self._records)

    def record_end(self, state: State, exit_code: int | None) -> None:
        """Record the result of the patch that was started last."""
        if self._directory is not None:
            self._records[-1] = structs.replace(self._records[-1], state=state, exit_code=exit_code)
            patch_records.write_records(self._directory, self._node_rank, self._records)


def _own_name(path: Path) -> str:
    """Original name of a copy from another run's record, without its number; empty for a file of the user."""
    is_copy = path.parent.parts[-2:] == tuple(patch_records.FOLDER.split("/"))
    return re.sub(r"^\d+_", "", path.name) if is_copy else ""
