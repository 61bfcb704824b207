"""Write the archive of a run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from primus import __version__, registry
from primus.config.load import load_experiment
from primus.errors import PrimusError, UsageError
from primus.images.build_context import PARTS
from primus.run_archive import data_files, guide_files, run_files, tar_members
from primus.run_archive.compression import check_ending, open_writer
from primus.run_archive.local_paths import PathNames, list_places
from primus.run_archive.manifest import CHECKOUT, MANIFEST, RUN, ArchivedFile, ArchiveManifest, is_safe_name
from primus.runs.files import to_json
from primus.runs.source_record import DIFFERENCES_FILE, SourceRecord, read_source_record
from primus.runs.store import Run
from primus.runs.working_folder import find_working_folder

CHUNK = 1 << 20
GIT_LIMIT_S = 60.0


class ExportChoices(Struct, frozen=True, kw_only=True):
    """What an archive holds besides the record of a run."""

    with_checkpoint: bool = False
    with_data: bool = False
    with_hashes: bool = False
    """Whether the package index is asked for hashes."""


class RunArchive(Struct, frozen=True, kw_only=True):
    """An archive that was written."""

    file: str
    size_bytes: int
    num_files: int
    omitted: list[str]
    """What the run has and the archive lacks, with the reason."""
    local_paths: list[str]
    """Settings that name a place that another machine may not have."""


def export_run(run: Run, output: Path, choices: ExportChoices, environ: Mapping[str, str]) -> RunArchive:
    """Write the archive of `run` to `output` by rename. Two exports of a run give the same bytes.

    Raises:
        UsageError: The output's ending is unknown, or data or weights are not here.
        UnfitError: Nothing on this machine writes .zst.
        PrimusError: The run is damaged, a file cannot be read, or the archive cannot be written.
    """
    ending = check_ending(output)
    run_files.check_files(run)
    temporary = output.with_name(f".{output.name}.tmp.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Beside the archive: the folder for temporary files may be a small one in memory.
        with tempfile.TemporaryDirectory(prefix=".run-export-", dir=output.parent) as place:
            folder = Path(place)
            files, omitted = _fill_folder(run, folder, choices, environ)
            manifest = _make_manifest(run, files, omitted)
            _write_archive(manifest, files, temporary, ending, int(run.read_metadata().created))
            os.replace(temporary, output)
            local = list(run_files.list_local_paths(folder / RUN))
    except OSError as error:
        raise PrimusError(
            f"{output}: cannot be written: {error.strerror or error}", "free some space, or name another --output"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    size, number = output.stat().st_size, len(manifest.files) + 1
    return RunArchive(file=str(output), size_bytes=size, num_files=number, omitted=omitted, local_paths=local)


def _fill_folder(
    run: Run, folder: Path, choices: ExportChoices, environ: Mapping[str, str]
) -> tuple[dict[str, Path], list[str]]:
    """Write the texts of the archive into `folder`; gives the source of each file, and what is left out."""
    # Secret settings stay masked: a replay asks for their values.
    asked = load_experiment(run.config, environ=None, is_resolved=True).experiment
    working_folder = find_working_folder(run, asked.workspace)
    omitted: list[str] = []
    added, settings = dict[str, Path](), dict[str, object]()
    if choices.with_data:
        data = data_files.collect_data(asked.trainer, working_folder)
        added, settings = added | data.files, settings | data.settings
    elif not asked.trainer.data.mock_data:
        omitted.append("data and tokenizer: --with-data adds them")
    if choices.with_checkpoint:
        weights = data_files.collect_weights(run, asked.trainer, working_folder)
        added, settings = added | weights.files, settings | weights.settings
    elif run.checkpoints.is_dir():
        omitted.append("checkpoints: --with-checkpoint adds the newest one")

    names = PathNames(list_places(run, working_folder, environ))
    run_files.write_run_files(run, folder, names, settings, omitted)
    run_files.write_plug_ins(run, folder, names, omitted)
    problem = _write_checkout(run, folder)
    if problem:
        omitted.append(problem)
    metadata = run.read_metadata()
    environment = guide_files.read_environment(run, has_checkout=not problem)
    hashed = guide_files.find_hashes(environment, environ) if choices.with_hashes else None
    command = ["primus-cli", "direct", "--", *metadata.task.split(), "--replay", f"output/{metadata.name}/{run.id}"]
    texts = {
        guide_files.README: guide_files.format_readme(
            environment, run, metadata.name, command, has_data=choices.with_data
        ),
        guide_files.LOCK: guide_files.format_lock(environment, hashed),
        guide_files.DOCKERFILE: guide_files.format_dockerfile(environment, run, command, has_hashes=hashed is not None),
    }
    for name, text in texts.items():
        (folder / name).write_text(names.replace(text), encoding="utf-8")
    return dict(sorted((added | dict(_walk_files(folder))).items())), omitted


def _walk_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of each file below a folder; links of the checkout are the files that they lead to."""
    whole = root.resolve()
    for place, folders, files in os.walk(root, followlinks=True):
        # Not out of the checkout, and not around in a circle.
        folders[:] = [
            name
            for name in folders
            if (there := Path(place, name).resolve()).is_relative_to(whole)
            and not Path(place).resolve().is_relative_to(there)
        ]
        for path in (Path(place, name) for name in files):
            if path.is_file() and path.resolve().is_relative_to(whole):
                yield path.relative_to(root).as_posix(), path


def _write_checkout(run: Run, folder: Path) -> str:
    """Write the sources that the run was started from; gives the reason if that is not possible."""
    record = read_source_record(run)
    if record is None or not record.revision:
        return "sources of primus: the run did not start from a git checkout; the lock has its version"
    if record.is_masked:
        return f"sources of primus: the differences from commit {record.revision[:12]} held a secret"
    root = registry.PACKAGE.parents[1]
    try:
        _unpack_commit(root, record, folder / CHECKOUT)
        if record.differences_sha256:
            _apply_differences(run.directory / DIFFERENCES_FILE, folder / CHECKOUT)
    except (OSError, subprocess.SubprocessError, tarfile.TarError):
        shutil.rmtree(folder / CHECKOUT, ignore_errors=True)
        return f"sources of primus: git cannot make {record} from this checkout"
    return ""


def _unpack_commit(root: Path, record: SourceRecord, target: Path) -> None:
    listed = _run_git(["ls-tree", "--name-only", record.revision], root).decode().split()
    content = _run_git(["archive", record.revision, "--", *(name for name in PARTS if name in listed)], root)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            path = target / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is not None:
                path.write_bytes(stream.read())
            elif member.issym():
                path.symlink_to(member.linkname)


def _apply_differences(differences: Path, target: Path) -> None:
    # The folder may lie in another repository, whose files git would patch.
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(target.parent)}
    words = [
        "git",
        "apply",
        "--whitespace=nowarn",
        *(f"--include={part}*" for part in PARTS),
        str(differences.resolve()),
    ]
    subprocess.run(words, cwd=target, env=environ, capture_output=True, timeout=GIT_LIMIT_S, check=True)


def _run_git(words: list[str], root: Path) -> bytes:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, timeout=GIT_LIMIT_S, check=True).stdout


def _make_manifest(run: Run, files: Mapping[str, Path], omitted: list[str]) -> ArchiveManifest:
    metadata = run.read_metadata()
    wrong = next((name for name in files if not is_safe_name(name)), None)
    if wrong is not None:
        raise UsageError(f"{wrong!r}: a name that not every system has", "rename the file")
    return ArchiveManifest(
        run=metadata.id,
        experiment=metadata.name,
        primus=__version__,
        omitted=omitted,
        files=[_describe_file(name, path) for name, path in files.items()],
    )


def _describe_file(name: str, path: Path) -> ArchivedFile:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        return ArchivedFile(name=name, size=file.tell(), sha256=digest.hexdigest())


def _write_archive(
    manifest: ArchiveManifest, files: Mapping[str, Path], output: Path, ending: str, time_s: int
) -> None:
    """Write the manifest and the files; all have the time of the run."""
    top = f"{manifest.experiment}-{manifest.run}"
    text = f"{to_json(manifest)}\n".encode()
    with open_writer(output, ending) as stream:
        stream.write(tar_members.format_header(f"{top}/{MANIFEST}", len(text), time_s))
        stream.write(text + tar_members.pad(len(text)))
        for entry in manifest.files:
            stream.write(tar_members.format_header(f"{top}/{entry.name}", entry.size, time_s))
            with files[entry.name].open("rb") as file:
                _copy_file(file, stream, entry, files[entry.name])
            stream.write(tar_members.pad(entry.size))
        stream.write(tar_members.END)


def _copy_file(file: BinaryIO, stream: BinaryIO, entry: ArchivedFile, path: Path) -> None:
    """Copy a file as its entry describes it.

    Raises:
        PrimusError: It has changed.
    """
    digest, left = hashlib.sha256(), entry.size
    while left and (chunk := file.read(min(CHUNK, left))):
        digest.update(chunk)
        stream.write(chunk)
        left -= len(chunk)
    if left or digest.hexdigest() != entry.sha256:
        raise PrimusError(f"{path}: changed while it was exported", "export the run when nothing writes to it")
