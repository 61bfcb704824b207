"""Images are built from pinned templates without secrets, and only those of primus are listed and removed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from fakes import cli
from primus import registry
from primus.images.template import ROOT, read_template

ENGINE = """\
#!/bin/sh
here={folder}
printf '%s ' "${{0##*/}}" "$@" >>"$here/calls"
echo >>"$here/calls"
case $1 in
build)
    for word; do context=$word; done
    cp -R "$context" "$here/context"
    env >"$here/environ"
    [ ! -e "$here/full" ] || {{ echo "write /opt: no space left on device"; exit 125; }}
    ;;
images) cat "$here/images" 2>/dev/null ;;
image) echo '[{{"Config": {{"Labels": {{"primus.image": "cpu"}}}}}}]' ;;
rmi) [ "$2" != used ] || {{ echo "image is in use by a container" >&2; exit 2; }} ;;
esac
"""


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    """A folder of PATH with a podman that writes down what it is asked."""
    folder = tmp_path / "engines"
    folder.mkdir()
    (folder / "podman").write_text(ENGINE.format(folder=folder))
    (folder / "podman").chmod(0o755)
    return folder


def run_image(engines: Path, *words: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    path = f"{engines}{os.pathsep}/usr/bin{os.pathsep}/bin"
    dry = [word for word in words if word == "--dry-run"]
    rest = [word for word in words if word != "--dry-run"]
    named = [] if "--engine" in rest else ["--engine", "podman"]
    line = [*dry, "direct", "--", "image", *rest, *named]
    return cli.run(*line, cwd=engines.parent, PATH=path, PRIMUS_CONTAINER_ENGINE=None, **env)


@pytest.mark.parametrize("platform", registry.list_plug_ins("images"))
def test_templates_are_pinned_and_named_in_full(platform: str) -> None:
    registry_host, _, name = read_template(platform).base.partition("/")
    assert "." in registry_host, "podman searches no registry for a full name"
    tag = name.rpartition(":")[2]
    assert tag != "latest" and any(letter.isdigit() for letter in tag)


def test_dry_run_prints_the_file_and_the_command_and_runs_no_engine(engines: Path) -> None:
    before = sorted(engines.parent.rglob("*"))
    done = run_image(
        engines, "--dry-run", "build", "--platform", "amd", "--secret", "PIP_INDEX_URL", PIP_INDEX_URL="s3cret"
    )
    assert done.returncode == 0, done.stderr
    assert "FROM ${BASE}" in done.stdout and "ARG BASE=docker.io/rocm/primus:v26.5" in done.stdout
    assert "--mount=type=secret,id=PIP_INDEX_URL" in done.stdout
    assert "--secret id=PIP_INDEX_URL,env=PIP_INDEX_URL" in done.stdout
    assert "s3cret" not in done.stdout + done.stderr
    assert sorted(engines.parent.rglob("*")) == before


def test_build_gives_the_engine_the_tracked_files_with_the_time_of_the_commit(engines: Path) -> None:
    done = run_image(
        *(engines, "build", "--platform", "cpu", "--framework", "torchtitan", "--base", "localhost/base:1"),
        *("--secret", "PIP_INDEX_URL", "--build-option=--network=host"),
        PIP_INDEX_URL="s3cret",
        SOURCE_DATE_EPOCH="1700000000",
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split((engines / "calls").read_text().splitlines()[0])
    assert words[:2] == ["podman", "build"]
    for option, value in (("--timestamp", "1700000000"), ("--tag", "localhost/primus:cpu")):
        assert words[words.index(option) + 1] == value
    assert "BASE=localhost/base:1" in words and "--network=host" in words
    assert "s3cret" not in (engines / "calls").read_text()
    assert "PIP_INDEX_URL=s3cret" in (engines / "environ").read_text(), "the engine reads it from its environment"
    context = engines / "context"
    text = (context / "Containerfile").read_text()
    assert f"PRIMUS_TORCH=cpu {ROOT}/primus-cli setup --engine torchtitan" in text and "s3cret" not in text
    assert 'primus.image="cpu"' in text
    assert os.access(context / "primus-cli", os.X_OK) and (context / "src/primus/cli/main.py").is_file()
    assert not list(context.rglob("__pycache__")) and not (context / ".git").exists()


def test_a_secret_is_given_by_name_and_must_be_set(engines: Path) -> None:
    done = run_image(engines, "build", "--platform", "cpu", "--secret", "TOKEN=hf_abcdefgh")
    assert done.returncode == 2
    assert "takes the name of a variable" in done.stderr and "hf_abcdefgh" not in done.stderr
    done = run_image(engines, "build", "--platform", "cpu", "--secret", "TOKEN", TOKEN=None)
    assert (done.returncode, "variable 1 of 1 is not set\n  export it" in done.stderr) == (2, True)


def test_what_stops_a_build_is_one_message(engines: Path) -> None:
    (engines / "full").touch()
    done = run_image(engines, "build", "--platform", "cpu")
    assert done.returncode == 1 and "image clean --yes" in done.stderr
    done = run_image(engines, "build", "--platform", "adm")
    assert done.returncode == 2 and "did you mean 'amd'?" in done.stderr
    done = run_image(engines, "build", "--platform", "cpu", "--engine", "apptainer")
    assert done.returncode == 2 and "cannot build images" in done.stderr
    done = run_image(engines, "list", "--engine", str(engines / "none/podman"))
    assert done.returncode == 3 and "not found" in done.stderr
    assert not list(engines.parent.glob("primus-image-*"))


def test_clean_lists_first_and_removes_only_images_with_our_label(engines: Path) -> None:
    (engines / "images").write_text(
        "used\tlocalhost/primus:amd\t9 GB\t1 day ago\nfree\tlocalhost/primus:cpu\t1 GB\tnow\n"
    )
    done = run_image(engines, "clean")
    assert done.returncode == 0 and "run again with --yes" in done.stdout
    assert "rmi" not in (engines / "calls").read_text()
    done = run_image(engines, "clean", "--yes", "--json")
    assert done.returncode == 1, "a container uses one of them"
    found = json.loads(done.stdout)
    assert found["removed"] == ["localhost/primus:cpu"]
    assert "in use" in found["problems"][0]
    calls = (engines / "calls").read_text().splitlines()
    assert all("label=primus.image" in call for call in calls if call.startswith("podman images"))
    assert [call for call in calls if " rmi " in call] == ["podman rmi used ", "podman rmi free "]


BUILDAH = """\
#!/bin/sh
case $1 in
images) echo '[{"id": "32e992f23e6e", "names": ["localhost/primus:cpu"], "createdat": "7 minutes ago", "size": "2 GB"},
               {"id": "4594c80fab1f", "names": null, "createdat": "now", "size": "2 GB"}]' ;;
inspect) echo '{"FromImage": "localhost/primus:cpu", "Config": "{}",
                "OCIv1": {"config": {"Labels": {"primus.image": "cpu"}}}}' ;;
esac
"""


def test_images_of_buildah_are_read_from_its_own_json(engines: Path) -> None:
    (engines / "buildah").write_text(BUILDAH)
    (engines / "buildah").chmod(0o755)
    listed = run_image(engines, "list", "--engine", "buildah", "--json")
    assert listed.returncode == 0, listed.stderr
    assert [each["name"] for each in json.loads(listed.stdout)] == ["localhost/primus:cpu", "<none>:<none>"]
    shown = run_image(engines, "show", "localhost/primus:cpu", "--engine", "buildah", "--json")
    assert json.loads(shown.stdout)["labels"] == {"primus.image": "cpu"}
