"""A run is exported in one place, imported in another one, and replayed there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from fakes import cli
from fakes.archives import extract_all
from primus.run_archive.manifest import MANIFEST
from primus.runs import events

CANARY = "canary-3f9a7c1e"


def read_members(archive: Path) -> dict[str, bytes]:
    """Content by name below the top folder."""
    with tarfile.open(archive) as opened:
        return {name.partition("/")[2]: opened.extractfile(name).read() for name in opened.getnames()}  # type: ignore[union-attr]


def find_run(folder: Path) -> Path:
    (run,) = (path for path in (folder / "output/night").glob("2*") if not path.is_symlink())
    return run


def read_losses(run: Path) -> list[float]:
    return [event["loss"] for event in events.read_steps(run / "events.jsonl")]


@pytest.fixture(scope="module")
def imported(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another folder of another user, with the imported run."""
    folder = tmp_path_factory.mktemp("second").resolve()
    (folder / "home").mkdir()
    done = cli.run("direct", "--", "runs", "import", str(archive), cwd=folder, HOME=str(folder / "home"))
    assert done.returncode == 0, done.stderr
    assert "repeat it: primus-cli direct -- train pretrain --replay output/night/" in done.stdout
    assert "a replay executes output/night/" in done.stdout and "patch.sh: read it first" in done.stdout
    assert "export PRIMUS_PLUGINS=output/night/" in done.stdout
    return folder


def test_an_imported_run_is_replayed_with_the_same_losses_variables_and_patches(
    original: Path, imported: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "third"
    shutil.copytree(imported, folder, symlinks=True)
    run = find_run(folder)
    # The plug-ins of the archive, not those of this checkout; another user, who has set nothing.
    environ = {"HOME": str(folder / "home"), "PRIMUS_PLUGINS": str(run / "env/plug-ins/0"), "SERVICE_TOKEN": "mine"}
    done = cli.run("direct", "--", "train", "pretrain", "--replay", "night", cwd=folder, **environ)
    assert done.returncode == 0, done.stderr
    replayed = (folder / "output/night/latest").resolve()
    assert replayed.name != run.name
    assert read_losses(replayed) == read_losses(find_run(original)) == [7.0, 3.5, 7 / 3]
    dump = (replayed / "env/primus_env_dump.txt").read_text()
    assert f"\nCACHE={folder.parent / 'third'}/cache  #" in dump or f"\nCACHE={imported}/cache  #" in dump
    assert "\nFROM_THE_FILE=1  #" in dump and "\nOMP_NUM_THREADS=1  #" in dump
    (patch,) = json.loads((replayed / "env/patches.json").read_text())
    assert (patch["name"], patch["state"]) == ("0_patch.sh", "applied") or patch["state"] == "applied"


def test_an_archive_holds_no_secret_and_no_folder_of_the_machine(original: Path, archive: Path) -> None:
    members = read_members(archive)
    texts = {name: data for name, data in members.items() if not name.startswith("checkout/")}
    assert [name for name, data in texts.items() if CANARY.encode() in data] == []
    for place in (str(original), str(cli.SOURCE.parent)):
        assert [name for name, data in texts.items() if place.encode() in data] == []
    assert b"CACHE: <folder>/cache" in members["run/config/primus_config.yaml"]
    assert b"HOME=<home>  # shell" in members["run/env/primus_env_dump.txt"]
    system = json.loads(members["run/env/system_info.json"])
    assert all("addresses" not in interface for interface in system["facts"]["interfaces"])


def test_the_manifest_has_the_size_and_hash_of_every_file(archive: Path) -> None:
    members = read_members(archive)
    manifest = json.loads(members.pop(MANIFEST))
    assert (manifest["format_version"], manifest["experiment"]) == (1, "night")
    assert {file["name"]: (file["size"], file["sha256"]) for file in manifest["files"]} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in members.items()
    }


def test_the_guides_name_the_packages_the_base_and_the_command(archive: Path) -> None:
    members = {name: data.decode() for name, data in read_members(archive).items() if "/" not in name}
    lock = members["requirements.lock"]
    packages = [line for line in lock.splitlines() if "==" in line]
    assert any(line.startswith("msgspec==") for line in packages)
    assert "# Plain pins" in lock
    readme = members["README.md"].strip().splitlines()
    assert len(readme) == 12, "a title and ten lines"
    assert "It took 3 steps to a loss of 2.33333" in readme[2]
    assert "FROM ${BASE}" in members["Dockerfile"] and '"--replay", "output/night/' in members["Dockerfile"]
    assert "runs import /opt/run-archive" in members["Dockerfile"]


def test_two_exports_of_a_run_are_the_same_bytes(original: Path, archive: Path, tmp_path: Path) -> None:
    words = ["direct", "--", "runs", "export", "night", "--output", str(tmp_path / "again.tar.gz")]
    done = cli.run(*words, cwd=original, HOME=str(original / "home"), HF_TOKEN=CANARY)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.tar.gz").read_bytes() == archive.read_bytes()
    assert os.listdir(tmp_path) == ["again.tar.gz"]


def test_the_sources_of_an_archive_are_a_working_primus(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as opened:
        extract_all(opened, tmp_path)
    (top,) = tmp_path.iterdir()
    if not (top / "checkout").is_dir():
        pytest.skip("this package is not in a git checkout")
    variables = {"PYTHONPATH": str(top / "checkout/src"), "PYTHONDONTWRITEBYTECODE": ""}
    done = cli.run("direct", "--", "runs", "import", str(top), cwd=tmp_path, **variables)
    assert any(top.rglob("__pycache__"))
    assert done.returncode == 0, done.stderr
    assert (find_run(tmp_path) / "events.jsonl").is_file()
    assert not (find_run(tmp_path) / "archive/checkout").exists()


def test_an_import_does_not_replace_a_run(archive: Path, imported: Path) -> None:
    before = (find_run(imported) / "metadata.json").read_bytes()
    done = cli.run("direct", "--", "runs", "import", str(archive), cwd=imported)
    assert done.returncode == 2
    assert "exists: the run has been imported" in done.stderr
    assert (find_run(imported) / "metadata.json").read_bytes() == before


def test_a_replay_names_what_another_machine_lacks_before_it_starts(imported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "third"
    shutil.copytree(imported, folder, symlinks=True)
    run = find_run(folder)
    system = json.loads((run / "env/system_info.json").read_text())
    system |= {"cpu_model": "Abacus 1", "cpu_cores": 1000}
    system["facts"]["software"]["rocm"] = "1.2"
    (run / "env/system_info.json").write_text(json.dumps(system))
    sources = json.loads((run / "env/sources.json").read_text())
    (run / "env/sources.json").write_text(json.dumps(sources | {"package_sha256": "0" * 64}))
    plug_ins = tmp_path / "plug-ins"
    shutil.copytree(run / "env/plug-ins/0", plug_ins)
    with (plug_ins / "frameworks/abacus.py").open("a") as file:
        file.write("# changed\n")
    done = cli.run(
        *("direct", "--", "train", "pretrain", "--replay", "night"),
        cwd=folder,
        PRIMUS_PLUGINS=str(plug_ins),
        SERVICE_TOKEN="mine",
    )
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    for said in (
        "replay: processor: Abacus 1 then, ",
        "replay: cores: 1000 then, ",
        "replay: ROCm: 1.2 then, ",
        "replay: sources of primus: ",
        "replay: plug-in frameworks/abacus.py: ",
    ):
        assert [line for line in lines if line.startswith(said)], (said, done.stdout)
    assert "may change the last bits of the losses: sums in another order; and speed" in done.stdout
    assert "3 differences may change the losses" in done.stderr
    assert len(list((folder / "output/night").glob("2*"))) == 1, "nothing was started"
