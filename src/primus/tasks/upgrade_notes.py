"""Print what to change in your files and scripts when you upgrade primus."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct

from primus import __version__, package_files
from primus.errors import UsageError, did_you_mean
from primus.task import TaskContext

Version = tuple[int, ...]
UPGRADE = "What to change when you upgrade"
"""Heading of the changes that need an edit."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `upgrade-notes`."""

    older: Annotated[str, Meta(extra={"positional": True})]
    """Version that you used, such as 0.1.0."""
    newer: Annotated[str, Meta(extra={"positional": True})] = __version__
    """Version that you upgrade to (default: the installed one)."""
    all: bool = False
    """Print every change, not only those that need an edit."""


_CHANGE = re.compile(r"^- .+\n?(?:^  .*\n?)*", re.MULTILINE)


class Release(Struct, frozen=True, kw_only=True):
    """The changes of one version."""

    version: str
    areas: dict[str, list[str]]
    """Changes by heading."""


def run(options: Options, context: TaskContext) -> None:
    """Print the changes of the versions after `older`, up to `newer`.

    Raises:
        UsageError: One of them is not a version, or the changelog does not have it.
    """
    releases = parse_changelog(package_files.CHANGELOG.read_text(encoding="utf-8"))
    known = [release.version for release in releases]
    first, last = (_parse_version(text) for text in (options.older, options.newer))
    if options.newer not in known:
        raise UsageError(f"no version {options.newer} in the changelog", did_you_mean(options.newer, known))
    if first > last:
        raise UsageError(f"{options.older} is newer than {options.newer}", "upgrade-notes OLDER NEWER")
    chosen = [
        Release(version=each.version, areas={k: v for k, v in each.areas.items() if options.all or k == UPGRADE})
        for each in releases
        if first < _parse_version(each.version) <= last
    ]
    blocks = [f"# {each.version}\n\n{_format_areas(each.areas)}" for each in chosen]
    same = f"no changes from {options.older} to {options.newer}"
    context.result(chosen, "\n\n".join(blocks) or same)


def _format_areas(areas: dict[str, list[str]]) -> str:
    return "\n\n".join(f"## {area}\n\n" + "\n".join(changes) for area, changes in areas.items()) or "nothing to change"


def parse_changelog(text: str) -> list[Release]:
    """The versions of a changelog, newest first; a heading is `## 0.1.0 (date)` or `## Unreleased (0.1.0)`."""
    releases = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        version = re.search(r"\d+(\.\d+)+", heading)
        assert version, f"a heading of the changelog without a version: {heading}"
        areas = {}
        for area in re.split(r"^### ", body, flags=re.MULTILINE)[1:]:
            name, _, changes = area.partition("\n")
            areas[name] = [change.rstrip() for change in _CHANGE.findall(changes)]
        releases.append(Release(version=version[0], areas=areas))
    return releases


def _parse_version(text: str) -> Version:
    match = re.match(r"\d+(\.\d+)*", text)
    if not match:
        raise UsageError(f"{text}: not a version", "write it as primus-cli --version does, for example 0.1.0")
    return tuple(map(int, match[0].split(".")))
