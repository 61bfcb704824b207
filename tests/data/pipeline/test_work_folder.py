from __future__ import annotations

from pathlib import Path

from primus.data.pipeline.shards import Part, Shard
from primus.data.pipeline.work import Board
from primus.data.pipeline.work_folder import WorkFolder


def test_a_board_that_somebody_works_on_is_not_swept_before_it_is_left(tmp_path: Path) -> None:
    folder = WorkFolder.beside(tmp_path / "out")
    board = Board(None, [Shard(0, (Part("a"),), 1)], folder.path / "0123")  # type: ignore[arg-type]
    board.folder.mkdir(parents=True)
    with folder.using(board):
        for complete in (False, True):
            WorkFolder.beside(tmp_path / "out").sweep(complete)
            assert board.folder.is_dir()
    folder.sweep(complete=False)
    assert list(tmp_path.iterdir()) == []
