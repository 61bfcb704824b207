"""The quick start, shortened: exported with its data, imported by another user with the sources of the archive."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from fakes import cli
from fakes.archives import extract_all
from primus.runs import events

pytest.importorskip("torch")
pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SHORT = ("--train_iters", "3", "--eval_iters", "1", "--micro_batch_size", "1", "--seq_length", "64")
SMALL = ("--sample_tokens", "0", "--save_interval", "3", "--hidden_size", "64", "--num_layers", "2")


def run(folder: Path, *words: str, **env: str) -> str:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    done = cli.run(
        "direct", "--", *words, cwd=folder, timeout_s=280, **{"HOME": str(home), "PRIMUS_PLUGINS": "", **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_losses(run: Path) -> list[float]:
    steps = [event["loss"] for event in events.read_steps(run / "events.jsonl")]
    evaluations = [event["loss"] for event in events.read_events(run / "events.jsonl") if event["kind"] == "eval"]
    return steps + evaluations


def test_the_quick_start_gives_the_same_losses_elsewhere(tmp_path: Path) -> None:
    first, second = tmp_path / "ann", tmp_path / "bob"
    first.mkdir()
    second.mkdir()
    settings = ["--config", str(ROOT / "examples/quickstart.yaml"), *SHORT, *SMALL]
    run(first, "train", "pretrain", *settings)
    archive = second / "q.tar.zst"
    run(first, "runs", "export", "quickstart", "--output", str(archive), "--with-data", "--with-checkpoint")
    # As after the loss of the machine: only the archive is left.
    original = (first / "output/quickstart/latest").resolve()
    losses = read_losses(original)
    assert len(losses) == 4
    os.rename(first, tmp_path / "gone")

    sources = unpack_sources(archive, second)
    run(second, "runs", "import", "q.tar.zst", "--workspace", "shelf", PYTHONPATH=str(sources))
    (imported,) = (second / "shelf/quickstart").glob("2*-*")
    assert (imported / "checkpoints/step_00000003/manifest.json").is_file()
    run(second, "checkpoint", "verify", str(imported), PYTHONPATH=str(sources))
    said = run(second, "train", "pretrain", "--replay", str(imported), PYTHONPATH=str(sources))
    assert "may change" not in said
    replayed = (second / "output/quickstart/latest").resolve()
    assert read_losses(replayed) == losses
    command = json.loads((replayed / "plan.json").read_text())["argv"]
    assert any(str(sources) in word for word in command), "the sources of the archive have trained"
    assert not (second / "data").exists(), "the data of the archive were used"


def unpack_sources(archive: Path, folder: Path) -> Path:
    """The package in an archive; that of this checkout if the archive has none."""
    import zstandard

    with zstandard.open(archive, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as opened:
        extract_all(opened, folder)
    (found,) = folder.glob("quickstart-*")
    return found / "checkout/src" if (found / "checkout").is_dir() else ROOT / "src"
