"""Archives of comparisons, and the results of several folders, files and archives together.

An archive is a zip file of one comparison: its record, its results, and the small files of its run folders. Checkpoints
and profiles are not part of it. Results of several machines are compared by giving their archives to `compare report`.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from primus.comparison.folder.comparison_folder import LOGS, RECORD, RESULTS, ComparisonFolder
from primus.comparison.results.result import ComparisonResult, parse_result
from primus.errors import PrimusError, UsageError

RUN_FILES = ("metadata.json", "request.json", "plan.json", "events.jsonl", "config/*", "env/*", "logs/**/*")
"""Files of a run folder that an archive has; secrets were removed when they were written."""
LARGEST_LOG = 16 << 20
"""Logs above this size are not archived."""
CHECKSUMS = "SHA256SUMS"
"""Member with the digests of all others, in the form of sha256sum(1): a result that was edited later is noticed. It is
no signature: whoever edits both is not."""
MOST_BYTES = 256 << 20
"""Largest result that is read from an archive: a million steps. A few bytes of an archive may become gigabytes."""


class SkippedFile(Struct, frozen=True):
    """A file that is not a result."""

    file: str
    reason: str


class LoadedResults(Struct, frozen=True, kw_only=True):
    """Results, with the files that were skipped."""

    results: list[ComparisonResult]
    files: list[str]
    """File of each result; those of archives as ARCHIVE:FILE."""
    skipped: list[SkippedFile]


def load_results(paths: Sequence[Path]) -> LoadedResults:
    """The results in folders of comparisons, files and archives.

    Foreign JSON in a folder or an archive is skipped; a file that is named itself must be a result.

    Raises:
        UsageError: A path does not exist, is not a result, or nothing was found.
        PrimusError: A file is damaged.
    """
    results, files, skipped = [], [], []
    for path in paths:
        for name, data in _list_files(path):
            try:
                if data is None:
                    raise PrimusError(f"larger than {MOST_BYTES >> 20} MiB")
                results.append(parse_result(data, name))
                files.append(name)
            except UsageError as error:
                # Another version is an error: without its results the comparison would be another one.
                if (path.is_file() and not zipfile.is_zipfile(path)) or "version" in error.problem:
                    raise
                skipped.append(SkippedFile(name, error.problem.removeprefix(f"{name}: ")))
            except PrimusError as error:
                skipped.append(SkippedFile(name, error.problem.removeprefix(f"{name}: ")))
    if not results:
        listed = ", ".join(str(path) for path in paths)
        problem = f"no results in {listed}" + (f": {skipped[0].file}: {skipped[0].reason}" if skipped else "")
        raise UsageError(problem, "name the folder of a comparison, its results/*.json, or an archive of compare wrap")
    return LoadedResults(results=results, files=files, skipped=skipped)


def write_archive(folder: ComparisonFolder, output: Path, *, has_runs: bool) -> int:
    """Write the archive of a comparison by rename; gives the number of its files.

    Raises:
        UsageError: The folder has no results.
        PrimusError: The archive cannot be written.
    """
    files = list(_list_members(folder.path, has_runs=has_runs))
    if not any(file.parent.name == RESULTS for file in files):
        raise UsageError(f"{folder.path} has no results", "run its cells: compare run")

    temporary = output.with_name(f".{output.name}.tmp.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            # The name of the comparison is the top folder, so that archives of several can be unpacked together.
            top, sums = Path(folder.path.resolve().name), []
            for file in files:
                data, name = file.read_bytes(), file.relative_to(folder.path).as_posix()
                archive.writestr(zipfile.ZipInfo.from_file(file, top / name), data, zipfile.ZIP_DEFLATED)
                sums.append(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
            archive.writestr(str(top / CHECKSUMS), "".join(sums))
        os.replace(temporary, output)
    except OSError as error:
        raise PrimusError(
            f"{output}: cannot be written: {error.strerror}", "free some space, or name another --output"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return len(files)


def _list_members(folder: Path, *, has_runs: bool) -> Iterator[Path]:
    """Files of an archive, in the order of their names."""
    patterns = [RECORD, f"{RESULTS}/*.json", f"{LOGS}/*.log"]
    patterns += [f"runs/*/*/{pattern}" for pattern in RUN_FILES] if has_runs else []
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            is_own = path.is_file() and not path.is_symlink() and not path.name.startswith(".")
            if is_own and "latest" not in path.parts and path.stat().st_size <= LARGEST_LOG:
                yield path


def _list_files(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """Files that may be results, with their content; None for one that is too large."""
    if path.is_dir():
        # A comparison has its results in a folder; tprimat writes them next to each other.
        own = sorted((path / RESULTS).glob("*.json"))
        for file in own or sorted(path.glob("*.json")):
            yield str(file), _read_file(file)
    elif not path.is_file():  # a device may have no end
        raise UsageError(f"{path}: no such file or folder", "name the folder of a comparison, or an archive")
    elif path.suffix == ".zip" or zipfile.is_zipfile(path):
        yield from _list_archive(path)
    else:
        data = _read_file(path)
        if not data.lstrip().startswith((b"{", b"[")):
            raise UsageError(
                f"{path}: neither a result nor an archive of compare wrap", "unpack it, and name the folder"
            )
        yield str(path), data


def _list_archive(path: Path) -> Iterator[tuple[str, bytes | None]]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(path, archive)
            for member in archive.infolist():
                parts = Path(member.filename).parts
                is_json = parts and parts[-1].endswith(".json") and parts[-1] != RECORD
                if is_json and (RESULTS in parts or len(parts) <= 2):
                    is_small = member.file_size <= MOST_BYTES
                    yield f"{path}:{member.filename}", archive.read(member) if is_small else None
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise PrimusError(f"{path}: cannot be read: {error}", "copy the archive again") from None


def _check_members(path: Path, archive: zipfile.ZipFile) -> None:
    """Compare the results with the digests of the archive, if it has them.

    Raises:
        PrimusError: A result was changed, added or removed.
    """
    names = archive.namelist()
    for sums in [Path(name) for name in names if Path(name).name == CHECKSUMS]:
        recorded = {
            str(sums.parent / name): digest
            for digest, _, name in (line.partition("  ") for line in archive.read(str(sums)).decode().splitlines())
        }
        results = sums.parent / RESULTS
        found = {name for name in names if Path(name).parent == results}
        for name in sorted(found | {name for name in recorded if Path(name).parent == results}):
            is_small = name in found and archive.getinfo(name).file_size <= MOST_BYTES
            digest = hashlib.sha256(archive.read(name)).hexdigest() if is_small else None
            if digest != recorded.get(name):
                what = "changed" if name in recorded and name in found else "added" if name in found else "removed"
                raise PrimusError(f"{path}: {name} was {what} after compare wrap", "use the archive as it was made")


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None
