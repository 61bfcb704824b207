"""An archive that holds anything else than its manifest says is refused before anything is written."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.archives import extract_all
from primus.errors import PrimusError, UsageError
from primus.run_archive import import_run as imports
from primus.run_archive.import_run import import_run
from primus.run_archive.manifest import MANIFEST

RUN = "20250101_000000-abcd"
TOP = f"night-{RUN}"
FILES = {
    "README.md": b"# Run\n",
    "run/metadata.json": json.dumps({"id": RUN, "name": "night", "task": "train pretrain", "created": 1.0}).encode(),
    "run/request.json": b"{}",
    "run/plan.json": b'{"env": {}}',
    "run/events.jsonl": b"",
    "run/config/primus_config.yaml": b"workspace: ./output\nenv: {A: <home>/a}\n",
    "run/env/system_info.json": b"{}",
    "run/env/packages.txt": b"",
}
Members = list[tuple[tarfile.TarInfo, bytes]]
Tree = dict[str, Any]


def make_manifest(files: dict[str, bytes], **changes: Any) -> Tree:
    listed = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    ]
    tree = {"format_version": 1, "run": RUN, "experiment": "night", "primus": "0.1.0", "omitted": [], "files": listed}
    return tree | changes


def make_member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Any:
    info = tarfile.TarInfo(f"{TOP}/{name}")
    info.size, info.type, info.linkname = len(data), kind, link
    return info, data


def make_members(files: dict[str, bytes], manifest: Tree) -> Members:
    return [make_member(name, data) for name, data in {MANIFEST: json.dumps(manifest).encode(), **files}.items()]


def write(members: Members, folder: Path) -> Path:
    file = folder / "x.tar.gz"
    with tarfile.open(file, "w:gz", format=tarfile.USTAR_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return file


def refuse(file: Path, said: str, kind: type[PrimusError] = PrimusError) -> None:
    """The import fails with one message, and writes nothing."""
    workspace = file.parent / "workspace"
    with pytest.raises(kind) as failed:
        import_run(file, workspace, {"HOME": "/home/bob"})
    assert said in failed.value.problem, failed.value.problem
    assert not workspace.exists() or list(workspace.iterdir()) == []
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


def test_a_good_archive_is_imported_and_its_names_of_folders_are_replaced(tmp_path: Path) -> None:
    found = import_run(
        write(make_members(FILES, make_manifest(FILES)), tmp_path), tmp_path / "w", {"HOME": "/home/bob"}
    )
    assert found.run == str(tmp_path / f"w/night/{RUN}")
    assert "A: /home/bob/a" in Path(found.run, "config/primus_config.yaml").read_text()
    assert Path(found.run, "archive/README.md").read_bytes() == FILES["README.md"]
    assert (tmp_path / "w/night/latest").resolve() == Path(found.run)
    assert sorted(path.name for path in (tmp_path / "w/night").iterdir()) == [RUN, "latest", "logs", "tensorboard"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "is a symbolic link"),
        (tarfile.LNKTYPE, "is a hard link"),
        (tarfile.CHRTYPE, "is a device"),
        (tarfile.BLKTYPE, "is a device"),
        (tarfile.FIFOTYPE, "is a named pipe"),
        (tarfile.DIRTYPE, "is a folder"),
        (tarfile.XHDTYPE, "is an extended header"),
        (tarfile.GNUTYPE_LONGNAME, "is an extended header"),
    ],
)
def test_everything_but_regular_files_is_refused(kind: bytes, said: str, tmp_path: Path) -> None:
    members = make_members(FILES, make_manifest(FILES))
    members.insert(3, make_member("run/plan2.json", kind=kind, link="/etc/passwd"))
    refuse(write(members, tmp_path), said)


@pytest.mark.parametrize(
    "name", ["../x", "run/../../x", "/etc/x", "run//x", "run/./x", "run/a\\b", "run/a\nb", "", "run/", "x" * 256]
)
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    manifest = make_manifest({**FILES, name: b"x"})
    refuse(write(make_members(FILES, manifest), tmp_path), "is not the name of a file")


def test_a_member_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    members = make_members(FILES, make_manifest(FILES))
    for name in ("../x", "/etc/x", "other/run/plan.json"):
        info = tarfile.TarInfo(name)
        refuse(write([*members, (info, b"")], tmp_path), "is not in its manifest")


def test_a_file_that_the_manifest_does_not_name_is_refused(tmp_path: Path) -> None:
    members = make_members({**FILES, "run/hooks/x.sh": b"rm -rf ~"}, make_manifest(FILES))
    refuse(write(members, tmp_path), "'night-20250101_000000-abcd/run/hooks/x.sh' is not in its manifest")


def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    members = make_members(FILES, make_manifest(FILES))
    refuse(write([*members, members[3]], tmp_path), "is there twice")


Change = Callable[[Tree], object]
CHANGES: list[tuple[Change, str]] = [
    (lambda tree: tree["files"].append(tree["files"][0]), "is named twice"),
    (lambda tree: tree["files"].append(tree["files"][0] | {"name": "run"}), "is named twice"),
    (lambda tree: tree["files"].append(tree["files"][0] | {"name": "run/gone"}), "run/gone is missing"),
    (lambda tree: tree["files"][1].update(sha256="0" * 64), "run/metadata.json does not have its checksum"),
    (lambda tree: tree["files"][1].update(size=1), "instead of 1"),
    (lambda tree: tree["files"][1].update(size=-1), "is not the name of a file"),
    (lambda tree: tree["files"][1].update(size=10**15), "its files have 1,000,000,000,000,"),
    (lambda tree: tree.update(run="../../etc"), "is not the id of a run"),
    (lambda tree: tree.update(experiment="../x"), "is not the name of an experiment"),
    (lambda tree: tree.update(experiment=".."), "is not the name of an experiment"),
    (lambda tree: tree.update(experiment="day"), "is not of the run in it"),
    (lambda tree: tree.pop("files"), "MANIFEST.json: damaged"),
    (lambda tree: tree.update(format_version=2, files="new"), "format version 2"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=[said for _, said in CHANGES])
def test_a_manifest_that_does_not_fit_is_refused(change: Change, said: str, tmp_path: Path) -> None:
    manifest = make_manifest(FILES)
    change(manifest)
    members = make_members(FILES, manifest)
    refuse(write(members, tmp_path), said)


def test_a_newer_version_says_what_to_do(tmp_path: Path) -> None:
    file = write(make_members(FILES, make_manifest(FILES, format_version=9)), tmp_path)
    with pytest.raises(UsageError) as failed:
        import_run(file, tmp_path / "w", {})
    assert failed.value.hint == "update primus"


def test_gigabytes_of_zeros_are_not_unpacked(tmp_path: Path) -> None:
    """The size in a header decides, which is compared before the content is read."""
    manifest = json.dumps(make_manifest(FILES)).encode()
    info, data = make_member(MANIFEST, manifest)
    bomb = tarfile.TarInfo(f"{TOP}/README.md")
    bomb.size = 7 << 30
    file = tmp_path / "x.tar.gz"
    with gzip.open(file, "wb", 1) as stream:
        stream.write(info.tobuf(tarfile.USTAR_FORMAT) + data + b"\0" * (-len(data) % 512))
        stream.write(bomb.tobuf(tarfile.USTAR_FORMAT) + b"\0" * (1 << 20))
    refuse(file, f"has {7 << 30} bytes instead of 6")
    info.size = 1 << 31
    with gzip.open(file, "wb", 1) as stream:
        stream.write(info.tobuf(tarfile.USTAR_FORMAT) + b"\0" * (1 << 20))
    refuse(file, "its MANIFEST.json has 2,147,483,648 bytes")


def test_what_follows_the_end_is_refused(tmp_path: Path) -> None:
    file = write(make_members(FILES, make_manifest(FILES)), tmp_path)
    whole = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(whole + b"more"))
    refuse(file, "something follows its end")
    file.write_bytes(gzip.compress(whole + b"\0" * (1 << 20)))
    refuse(file, "something follows its end")


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_truncated_archive_is_refused(share: float, tmp_path: Path) -> None:
    file = write(make_members(FILES, make_manifest(FILES)), tmp_path)
    packed = file.read_bytes()
    file.write_bytes(packed[: int(share * len(packed))])
    refuse(file, "x.tar.gz: ")
    whole = gzip.decompress(packed)
    file.write_bytes(gzip.compress(whole[: int(share * 9000)]))
    refuse(file, "truncated")


@pytest.mark.parametrize(
    "content", [b"", b"not an archive", gzip.compress(b"", mtime=0), gzip.compress(b"x" * 2000, mtime=0)]
)
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)
    refuse(tmp_path / "x.tar.gz", "x.tar.gz: ")


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    refuse(write([make_member("run/plan.json", b"{}")], tmp_path), "not an archive of a run", UsageError)
    refuse(write([make_member(MANIFEST, b'{"a": 1}')], tmp_path), "not an archive of a run", UsageError)


def test_an_archive_without_a_file_that_a_replay_needs_is_refused(tmp_path: Path) -> None:
    files = {name: data for name, data in FILES.items() if name != "run/plan.json"}
    refuse(write(make_members(files, make_manifest(files)), tmp_path), "not complete: it lacks run/plan.json")


def test_an_archive_that_is_replaced_during_the_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(make_members(FILES, make_manifest(FILES)), tmp_path)
    write_run = imports._write_run

    def replace_first(*values: Any) -> Any:
        other = {**FILES, "run/request.json": b"[]"}
        write(make_members(other, make_manifest(other)), tmp_path)
        return write_run(*values)

    monkeypatch.setattr(imports, "_write_run", replace_first)
    refuse(file, "changed while it was imported")


def test_an_unpacked_archive_is_checked_as_well(tmp_path: Path) -> None:
    file = write(make_members(FILES, make_manifest(FILES)), tmp_path)
    with tarfile.open(file) as archive:
        extract_all(archive, tmp_path)
    folder = tmp_path / TOP
    (folder / "run/link").symlink_to("/etc/passwd")
    refuse(folder, "'run/link' is not in its manifest")
    (folder / "run/link").unlink()
    (folder / "run/plan.json").unlink()
    (folder / "run/plan.json").symlink_to("/etc/passwd")
    refuse(folder, "'run/plan.json' is not a regular file")
    (folder / "run/plan.json").unlink()
    refuse(folder, "run/plan.json is missing")
    (folder / "run/plan.json").write_bytes(b'{"env": {"A"')
    refuse(folder, "run/plan.json does not have its size")
    (folder / "run/plan.json").write_bytes(FILES["run/plan.json"])
    assert Path(import_run(folder, tmp_path / "w", {}).run, "plan.json").is_file()
