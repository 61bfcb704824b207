"""The CPU image is built by a real podman from a local base, twice the same, and works."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import containers
from cluster.containers import Podman
from fakes import cli

pytestmark = [pytest.mark.slow, pytest.mark.cluster("podman")]
TAG = "localhost/primus:test"


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    with tempfile.TemporaryDirectory(prefix="primus-test-") as folder:
        made = Podman(Path(folder) / "podman")
        yield made
        made.end()


def test_cpu_image_is_reproducible_holds_no_secret_and_prepares_data(podman: Podman, tmp_path: Path) -> None:
    volumes = [f"{place}:{place}:ro" for place in dict.fromkeys(containers.INTERPRETER)]
    line = [
        *("direct", "--", "image", "build", "--platform", "cpu", "--base", podman.image, "--prepared", "--tag", TAG),
        *("--engine", "podman", "--build-option=--network=none", "--build-option=--no-cache"),
        *(f"--build-option=--volume={volume}" for volume in volumes),
    ]
    environ = {**podman.environ, "SOURCE_DATE_EPOCH": "1700000000", "HF_TOKEN": "hf_canary"}
    ids = []
    for _ in range(2):
        done = cli.run(*line, cwd=tmp_path, timeout_s=120, **environ)
        assert done.returncode == 0, done.stderr
        ids.append(podman("image", "inspect", "--format", "{{.Id}}", TAG))
    assert ids[0] == ids[1]
    assert "hf_canary" not in podman("image", "inspect", TAG) + podman("history", "--no-trunc", TAG)

    shown = cli.run("direct", "--", "image", "show", TAG, "--engine", "podman", "--json", cwd=tmp_path, **environ)
    assert json.loads(shown.stdout)["labels"]["org.opencontainers.image.base.name"] == podman.image
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a sentence to learn from\n" * 200)
    task = "direct -- data prepare --input texts/a.txt --tokenizer bpe:260 --output out/mine"
    options = [word for volume in volumes for word in ("--volume", volume)]
    options += ["--volume", f"{tmp_path}:/workspace", "--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp"]
    podman("run", "--rm", "--network", "none", *options, TAG, "primus-cli", *task.split())
    assert (tmp_path / "out/mine_text_document.bin").stat().st_size > 0

    podman("tag", podman.image, "localhost/other:1")
    cleaned = cli.run("direct", "--", "image", "clean", "--yes", "--engine", "podman", cwd=tmp_path, **environ)
    assert cleaned.returncode == 0, cleaned.stderr
    names = podman("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    assert TAG not in names and {"localhost/other:1", podman.image} <= set(names)
