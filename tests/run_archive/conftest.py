"""A run to export, made by the real command with a framework that computes 7/n."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import cli

CANARY = "canary-3f9a7c1e"
EXPERIMENT = """\
env: {FROM_THE_FILE: '1', CACHE: FOLDER/cache, SERVICE_TOKEN: CANARY}
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""
PATCH = "#!/bin/sh\necho 'env.PATCHED=yes'\n"


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of `night`, which a user with the home folder `home` in it has started."""
    folder = tmp_path_factory.mktemp("first").resolve()
    (folder / "home").mkdir()
    (folder / "night.yaml").write_text(EXPERIMENT.replace("FOLDER", str(folder)).replace("CANARY", CANARY))
    (folder / "patch.sh").write_text(PATCH)
    words = ["direct", "--env", f"TYPED={folder}/typed", "--patch", "patch.sh", "--", "train", "pretrain"]
    settings = ["--config", "night.yaml", "--seed", "7"]
    variables = {"OMP_NUM_THREADS": "1", "HF_TOKEN": CANARY, "HOME": str(folder / "home")}
    done = cli.run(*words, *settings, cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def archive(original: Path) -> Path:
    """The archive of that run."""
    words = ["direct", "--", "runs", "export", "night", "--output", "night.tar.gz"]
    done = cli.run(*words, cwd=original, HOME=str(original / "home"), HF_TOKEN=CANARY)
    assert done.returncode == 0, done.stderr
    return original / "night.tar.gz"
