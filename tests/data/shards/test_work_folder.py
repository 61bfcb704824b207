from __future__ import annotations

from pathlib import Path

from primus.data.readers.shard import FilePart, Shard
from primus.data.shards.shard_queue import ShardQueue
from primus.data.shards.work_folder import WorkFolder


def test_a_board_that_somebody_works_on_is_not_swept_before_it_is_left(tmp_path: Path) -> None:
    folder = WorkFolder.for_output(tmp_path / "out")
    queue = ShardQueue(None, [Shard(0, (FilePart("a"),), 1)], folder.path / "0123")  # type: ignore[arg-type]
    queue.folder.mkdir(parents=True)
    with folder.mark_in_use(queue):
        for complete in (False, True):
            WorkFolder.for_output(tmp_path / "out").delete_unused(complete)
            assert queue.folder.is_dir()
    folder.delete_unused(complete=False)
    assert list(tmp_path.iterdir()) == []
