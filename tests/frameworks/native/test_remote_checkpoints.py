"""Checkpoints at a URL are complete or absent there, resume a run from there, and do not hold up training."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from primus.errors import UsageError
from primus.runs import events
from primus.runs.store import Run
from primus.session.checkpoints.remote import RemoteFolder, fetch_given
from primus.session.checkpoints.rewind import Rewind, write_rewinds

MakeRun = Callable[..., Run]
Train = Callable[..., Any]
URL = "memory://bucket/run"


class SlowStore(MemoryFileSystem):
    """A store that takes a fifth of a second for a file, and may refuse some."""

    protocol = "slow"
    store: ClassVar[dict[str, Any]] = {}
    refused: ClassVar[set[str]] = set()
    uploads_s = 0.0

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        if any(name in rpath for name in self.refused):
            raise OSError(28, "No space left on device")
        time.sleep(0.2)
        SlowStore.uploads_s += 0.2
        super().put_file(lpath, rpath, *args, **kwargs)


@pytest.fixture(autouse=True)
def empty_stores() -> Iterator[None]:
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    yield
    for kind in (MemoryFileSystem, SlowStore):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    SlowStore.refused.clear()


def list_losses(run: Run) -> dict[int, float]:
    return {each["step"]: each["loss"] for each in events.read_events(run.events) if each["kind"] == "step"}


def list_saves(run: Run) -> list[dict[str, Any]]:
    return [each for each in events.read_events(run.events) if each["kind"] == "checkpoint_saved"]


def test_a_run_resumes_from_the_store_when_its_folder_is_gone(make_run: MakeRun, train: Train) -> None:
    whole, run = make_run("whole"), make_run("run", save=URL, save_interval=3, keep_last_n=2)
    train(whole)
    train(run, stop=None)
    names = RemoteFolder(URL).list_complete()
    assert names == ["step_00000006", "step_00000008"], "older ones are deleted there, too"
    RemoteFolder(URL).remove("step_00000008")
    shutil.rmtree(run.checkpoints)
    train(run, 1)
    assert list_losses(run) == list_losses(whole)
    again = [each for each in events.read_events(run.events) if each["kind"] == "checkpoint_loaded"]
    assert [each["step"] for each in again] == [6]


def test_another_run_begins_with_a_checkpoint_of_the_store(make_run: MakeRun, train: Train) -> None:
    run = make_run("run", save=URL, train_iters=4)
    train(run)
    for name, load in (("newest", URL), ("named", f"{URL}/step_00000004")):
        other = make_run(name, load=load, finetune=True, train_iters=2)
        train(other)
        [loaded] = [each for each in events.read_events(other.events) if each["kind"] == "checkpoint_loaded"]
        assert loaded["step"] == 4 and loaded["weights_only"] and loaded["path"] == "loaded/step_00000004"
    with pytest.raises(UsageError, match="holds checkpoints of another run, "):
        train(make_run("third", save=URL))
    with pytest.raises(UsageError, match=r"no complete checkpoint at memory://bucket/run/step_00000009") as error:
        train(make_run("fourth", load=f"{URL}/step_00000009"))
    assert "complete ones there: step_00000004" in str(error.value.hint)


def test_training_goes_on_while_a_slow_store_is_written(make_run: MakeRun, train: Train) -> None:
    run = make_run("run", save="slow://bucket", save_interval=2, train_iters=3)
    train(run)
    told = [each for each in events.read_events(run.events) if each["kind"] in ("step", "checkpoint_saved")]
    # Two files take 0.4 s; the last step is taken before the first checkpoint counts.
    assert [each["step"] for each in told] == [1, 2, 3, 2, 3]
    [first, _] = list_saves(run)
    assert first["time_s"] > 0.4 and SlowStore.uploads_s >= 0.4


def test_a_checkpoint_that_the_store_refuses_is_absent_there_and_the_run_says_so(
    make_run: MakeRun, train: Train
) -> None:
    run = make_run("run", save="slow://bucket", save_interval=4, async_save=False)
    SlowStore.refused.add("step_00000004/.metadata")
    train(run)
    [failed] = [each for each in events.read_events(run.events) if each["kind"] == "checkpoint_failed"]
    assert failed["step"] == 4 and "No space left on device" in failed["problem"]
    assert RemoteFolder("slow://bucket").list_complete() == ["step_00000008"]
    assert [each["step"] for each in list_saves(run)] == [8]


def test_an_interrupted_upload_is_no_checkpoint(make_run: MakeRun, train: Train, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    run = make_run("run", save=url, train_iters=4)
    train(run)
    remote = RemoteFolder(url)
    assert remote.list_complete() == ["step_00000004"]
    # As a writer that was killed before the manifest leaves it.
    shutil.copytree(tmp_path / "store/step_00000004", tmp_path / "store/step_00000006")
    (tmp_path / "store/step_00000006/manifest.json").unlink()
    assert remote.list_complete() == ["step_00000004"]
    assert fetch_given(url, tmp_path / "copy").name == "step_00000004"


def test_a_checkpoint_that_a_rewind_has_undone_is_not_taken_from_the_store(make_run: MakeRun, train: Train) -> None:
    run = make_run("run", save=URL, save_interval=4)
    train(run)
    shutil.rmtree(run.checkpoints)
    write_rewinds(
        run, [Rewind(time=0.0, from_step=8, first_bad_step=8, to_step=4, first_sample=8, end_sample=16, reason="loss")]
    )
    train(run, 1)
    [loaded] = [each for each in events.read_events(run.events) if each["kind"] == "checkpoint_loaded"]
    assert loaded["step"] == 4


def test_a_protocol_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="s4://bucket: "):
        RemoteFolder("s4://bucket")
