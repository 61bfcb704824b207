"""Cells of a comparison from the results in folders, files and archives."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct, structs

from primus.comparison.result import ComparisonResult, parse_result
from primus.errors import PrimusError, UsageError

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
FOLDERS = ("", "results")
"""Where results stand in the folder of a comparison; the folders of its runs have JSON files of other kinds."""
MOST_BYTES = 1 << 30
"""Largest file that is read from an archive."""
TPRIMAT_NAME = re.compile(r"train_(?P<platform>amd|nvd|cpu)_(?P<framework>[a-z]+)_(?P<model>[a-z]+)")
TPRIMAT_MODELS = {"llama": "llama3.1_8B", "qwen": "qwen2.5_7B"}
"""Names of models in the files of tprimat: its README."""


class ComparisonCell(Struct, frozen=True, kw_only=True):
    """The results of one platform, framework, model and class of settings."""

    platform: str
    framework: str
    model: str
    settings_class: str
    device: str
    runs: list[ComparisonResult]
    """With steps, in order of their repetitions."""
    failed: list[ComparisonResult]

    @property
    def label(self) -> str:
        """How pictures and tables call the cell."""
        return " ".join(part for part in (self.platform, self.framework, self.model) if part)


class LoadedResults(Struct, frozen=True, kw_only=True):
    """The results that were found."""

    results: list[ComparisonResult]
    skipped: list[str]
    """Files that are not results, and why."""


def load_results(places: Sequence[Path]) -> LoadedResults:
    """The results in folders of comparisons, archives of `compare wrap` and single files.

    A file that is damaged or of another kind is skipped with its reason, and the others are read.

    Raises:
        UsageError: A place does not exist, or no place has a result.
    """
    results: list[ComparisonResult] = []
    skipped: list[str] = []
    seen: set[bytes] = set()
    for place in places:
        for name, data in _list_files(place):
            if data in seen:
                continue
            seen.add(data)
            try:
                results.append(_add_name_parts(parse_result(data, name), name))
            except PrimusError as error:
                skipped.append(error.problem)
    if not results:
        raise UsageError(
            f"{', '.join(map(str, places)) or 'nothing'}: no results"
            + (f"; {len(skipped)} files are skipped, the first: {skipped[0]}" if skipped else ""),
            "name the folder that compare run wrote, a file of compare extract, or an archive of compare wrap",
        )
    return LoadedResults(results=results, skipped=skipped)


def group_cells(results: Sequence[ComparisonResult]) -> list[ComparisonCell]:
    """The cells in the order in which their first results were found."""
    groups: dict[tuple[str, ...], list[ComparisonResult]] = {}
    for result in results:
        cell = result.cell
        key = (cell.platform, cell.framework, cell.model, cell.settings_class, result.gpu_info.device_name)
        groups.setdefault(key, []).append(result)
    return [
        ComparisonCell(
            platform=key[0],
            framework=key[1],
            model=key[2],
            settings_class=key[3],
            device=key[4],
            runs=sorted((each for each in members if _has_speed(each)), key=lambda each: each.cell.repetition),
            failed=[each for each in members if not _has_speed(each)],
        )
        for key, members in groups.items()
    ]


def _has_speed(result: ComparisonResult) -> bool:
    return result.state == "done" and bool(result.steps.number or result.performance_metrics.tokens_per_second_per_gpu)


def _list_files(place: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the JSON files of a place."""
    if place.is_dir():
        for folder in FOLDERS:
            for path in sorted((place / folder).glob("*.json")):
                yield str(path), path.read_bytes()
        return
    if not place.is_file():
        raise UsageError(f"{place}: does not exist", "name a folder, a file or an archive of results")
    if place.name.endswith(ARCHIVES):
        yield from _list_archive(place)
        return
    yield str(place), place.read_bytes()


def _list_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The JSON files of an archive, which is read in memory: nothing is extracted."""
    data = archive.read_bytes()
    try:
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as opened:
                for info in opened.infolist():
                    if _is_result_name(info.filename) and info.file_size <= MOST_BYTES:
                        yield f"{archive}:{info.filename}", opened.read(info)
            return
        with tarfile.open(fileobj=io.BytesIO(data)) as packed:
            for member in packed:
                content = packed.extractfile(member) if _is_result_name(member.name) else None
                if content is not None and member.size <= MOST_BYTES:
                    yield f"{archive}:{member.name}", content.read()
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise PrimusError(f"{archive}: damaged: {error}", "copy the archive again") from None


def _is_result_name(name: str) -> bool:
    """Whether a file of an archive stands where results do: at its top, or in a folder `results`, of one comparison."""
    parts = Path(name).parts
    return name.endswith(".json") and (len(parts) <= 2 or (len(parts) == 3 and parts[1] == "results"))


def _add_name_parts(result: ComparisonResult, name: str) -> ComparisonResult:
    """Framework and model of a file of tprimat, which states them in its name only."""
    found = TPRIMAT_NAME.search(Path(name).name)
    if result.source != "tprimat" or result.cell.framework or not found or found["platform"] != result.platform:
        return result
    model = TPRIMAT_MODELS.get(found["model"], found["model"])
    cell = structs.replace(result.cell, framework=found["framework"], model=model)
    return structs.replace(result, cell=cell, notes=[*result.notes, "framework and model are those of the file's name"])
