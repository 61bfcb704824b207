"""The import path of an interpreter, and the packages on it, read from files without starting it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

_ADDED_FOLDER = re.compile(r"addsitedir\((['\"])(.*?)\1\)")
"""A line of a .pth file by which an environment shares the packages of another one."""
_METADATA_FILES = ("METADATA", "PKG-INFO", "")
"""Of a wheel, of a folder of setuptools, and the file itself that distutils wrote."""
_METADATA_FIELD = re.compile(r"^(Name|Version): *(.*\S)", re.MULTILINE)
_VERSION_FILES = ("version.py", "_version.py", "package_info.py", "__init__.py")
_VERSION = re.compile(r"^__version__(?:: *str)? *= *['\"](\d[^'\"]*)['\"]", re.MULTILINE)
_VERSION_PARTS = re.compile(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", re.MULTILINE)
"""How Megatron-LM states its version (megatron/core/package_info.py)."""


def list_import_folders(prefix: Path) -> list[str]:
    """Folders that the interpreter of an environment imports packages from, in order."""
    folders: list[str] = []
    for site in sorted(prefix.glob("lib/python3*/site-packages")) + sorted(prefix.glob("lib/python3*/dist-packages")):
        _add_folder(site, folders)
    config = _read(prefix / "pyvenv.cfg")
    home = re.search(r"^home *= *(.+)$", config, re.MULTILINE)
    if home and re.search(r"^include-system-site-packages *= *true", config, re.MULTILINE):
        folders += [each for each in list_import_folders(Path(home[1].strip()).parent) if each not in folders]
    return folders


def _add_folder(site: Path, folders: list[str]) -> None:
    """Append a site folder, and those that its .pth files name, as `site.addsitedir` does."""
    if str(site) in folders or not site.is_dir():
        return
    folders.append(str(site))
    for file in sorted(site.glob("*.pth")):
        for line in _read(file).splitlines():
            for match in _ADDED_FOLDER.finditer(line):
                _add_folder(Path(match[2]), folders)
            if not line.startswith(("import ", "import\t", "#")) and line.strip():
                folder = os.path.normpath(site / line.strip())
                if folder not in folders and os.path.isdir(folder):
                    folders.append(folder)


def find_module_folder(module: str, folders: Iterable[str]) -> Path | None:
    """The first of `folders` that provides `module`; parent packages are not imported."""
    relative = module.replace(".", os.sep)
    for folder in folders:
        path = Path(folder) / relative
        if (path.is_dir() and _holds_code(path)) or path.with_suffix(".py").is_file():
            return Path(folder)
    return None


def _holds_code(folder: Path) -> bool:
    """Whether the folder holds a file of Python: an uninstalled package may leave an empty folder behind."""
    return next(folder.glob("*.py"), None) is not None or next(folder.glob("*.so"), None) is not None


def find_version(package: str, module: str, folders: Sequence[str]) -> str | None:
    """Version of a package that provides `module`: of the files that would be imported; None if it is unknown."""
    folder = find_module_folder(module, folders)
    if folder is None:
        return None
    return (
        find_distribution(package, [str(folder)])
        or _read_version(folder / module.replace(".", os.sep))
        or find_distribution(package, folders)
    )


def find_distribution(package: str, folders: Sequence[str]) -> str | None:
    """Version of an installed distribution."""
    return next((each.version for each in distributions(name=package, path=list(folders)) if each.version), None)


def _read_version(package: Path) -> str | None:
    for name in _VERSION_FILES:
        text = _read(package / name)
        match = _VERSION.search(text)
        if match:
            return match[1]
        parts = dict(_VERSION_PARTS.findall(text))
        if len(parts) == 3:
            return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"
    return None


def list_package_versions(folders: Sequence[str]) -> dict[str, str]:
    """Version by name in lower case of each package on an import path; the first folder takes precedence."""
    found: dict[str, str] = {}
    for name, version in _iterate_packages(folders):
        found.setdefault(name, version)
    return dict(sorted(found.items()))


def _iterate_packages(folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every launch lists them: `metadata` would read the fields and the long description anew for each field."""
    for each in distributions(path=list(folders)):
        text = next(filter(None, map(each.read_text, _METADATA_FILES)), "")
        fields = dict(_METADATA_FIELD.findall(text.partition("\n\n")[0]))
        if fields.keys() == {"Name", "Version"}:
            yield fields["Name"].lower(), fields["Version"]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
