"""Finds the files of a split of a dataset on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import msgspec
from msgspec import Struct

from primus import registry
from primus.data.readers.kinds import COLUMNS, RECORDS, TABLES, detect_kind
from primus.data.source import SOURCES, HubDataset
from primus.errors import UsageError, did_you_mean
from primus.web.hub import explain_hub_errors, import_hub_library, read_hub_endpoint
from primus.web.retries import print_stderr, repeat_download

CONVERTED = "refs/convert/parquet"
"""Branch with the parquet files that the hub generates, as CONFIG/SPLIT/0000.parquet."""
PARTIAL = "partial-"
"""Prefix of the name of a split on that branch that has only the first 5 GB."""

TIMEOUT_S = 15.0
PATHS_OF_A_REQUEST = 200

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in file names that identify a split on the hub (its documentation, "File names and splits")."""


class HubFile(Struct, frozen=True):
    """One file of a repository."""

    path: str
    """Path in the repository."""
    bytes: int
    """Size in bytes."""
    checksum: str
    """``sha256:...`` of large files, ``git-sha1:...`` (with git's header) of small ones; empty if unknown."""


class SplitListing(Struct, frozen=True, kw_only=True):
    """The files of one split."""

    repo: str
    revision: str
    """Commit of the files."""
    config: str
    split: str
    files: tuple[HubFile, ...]
    text: str | None = None
    note: str = ""
    """Note to the user about the origin of the files."""


def is_hub(name: str) -> bool:
    """Whether the name of a dataset is that of one on the hub: OWNER/NAME[:CONFIG], or a source that declares one.

    Raises:
        UsageError: The source is unknown.
        PrimusError: The source cannot be loaded.
    """
    if "/" in name:
        return True
    return registry.load_plug_in(SOURCES, name.partition(":")[0]).DATASET is not None


def list_split_files(
    name: str, split: str = "train", revision: str | None = None, say: Callable[[str], None] = print_stderr
) -> SplitListing:
    """List the files of a split of a dataset, at its newest commit unless `revision` names another.

    Args:
        name: OWNER/NAME or a source that declares one, then ``:CONFIG`` if it has several.
        split: Name of the split.
        revision: Commit, branch or tag.
        say: Receives messages, for example if the hub asks to wait.

    Raises:
        UsageError: The dataset, configuration or split is unknown; the message lists the valid names.
        PrimusError: The hub does not respond, or this user may not read the dataset.
    """
    source, _, config = name.partition(":")
    dataset = HubDataset(repo=source) if "/" in source else registry.load_plug_in(SOURCES, source).DATASET
    if dataset is None:
        raise UsageError(f"dataset {source}: it is not on the hub", f"`data prepare --dataset {source}` reads it here")
    import_hub_library(dataset.repo)
    with explain_hub_errors(dataset.repo, "dataset"):
        return repeat_download(read_hub_endpoint(), lambda: _list_files(dataset, config, split, revision), say)


def _list_files(dataset: HubDataset, config: str, split: str, revision: str | None) -> SplitListing:
    api = import_hub_library(dataset.repo).HfApi(endpoint=read_hub_endpoint())
    info = api.dataset_info(dataset.repo, revision=revision, timeout=TIMEOUT_S)
    names = sorted(sibling.rfilename for sibling in info.siblings or ())
    # In the order of their reliability; the parquet branch is the last resort, because it may have only the first 5 GB.
    for find in (_find_declared, _find_in_card, _find_by_name):
        found = find(dataset, info, names, config, split)
        if found:
            chosen, config = found
            files = _read_file_facts(api, dataset.repo, info.sha, chosen)
            return SplitListing(
                repo=dataset.repo, revision=info.sha, config=config, split=split, files=files, text=dataset.text
            )
    return _find_converted(api, dataset, names, config, split)


class CardConfig(Struct, frozen=True):
    """A configuration in the header of a dataset's README, as its authors write it."""

    config_name: object = "default"
    data_files: object = None
    data_dir: object = None
    default: object = False


Found = tuple[list[str], str]
"""Paths, and the configuration that they belong to."""


def _find_declared(dataset: HubDataset, info: Any, names: list[str], config: str, split: str) -> Found | None:
    """Files by the patterns that the source declares."""
    config = config or next(iter(dataset.files), "")
    for each, pattern in dataset.files.items():
        if fnmatchcase(config, each):
            if "{split}" not in pattern and split != "train":
                raise UsageError(f"{dataset.repo}: no split '{split}'", "valid: train")
            filled = pattern.replace("{config}", config).replace("{split}", split)
            return _require_split(dataset.repo, _match_patterns(names, [filled]), config, split), config
    return None


def _find_in_card(dataset: HubDataset, info: Any, names: list[str], config: str, split: str) -> Found | None:
    """Files by the header of the dataset's README."""
    configs = {str(each.config_name): each for each in _list_configs(info) if each.data_files is not None}
    if not configs:
        return None
    preferred = [name for name, each in configs.items() if each.default]
    config = _choose_config(dataset.repo, config, list(configs), preferred)
    patterns = _list_splits(configs[config].data_files)
    if not patterns:
        return None
    if split not in patterns:
        raise UsageError(f"{dataset.repo}: no split '{split}'", did_you_mean(split, patterns))
    folder = str(configs[config].data_dir or "")
    found = _match_patterns(names, [str(PurePosixPath(folder) / pattern) for pattern in patterns[split]])
    return _require_split(dataset.repo, found, config, split), config


def _find_by_name(dataset: HubDataset, info: Any, names: list[str], config: str, split: str) -> Found | None:
    """Files by their names, for a dataset with one configuration and without a loading script."""
    data = [name for name in names if detect_kind(name) in RECORDS | COLUMNS | TABLES | {".txt"}]
    data = [name for name in data if not PurePosixPath(name).name.startswith(("dataset_info", "README", "."))]
    if config or not data or _find_script(dataset.repo) in names:
        return None
    splits = {name: _detect_split(name) for name in data}
    if not any(splits.values()):
        splits = dict.fromkeys(data, "train")
    found = [name for name in data if splits[name] == split]
    if not found:
        known = sorted({each for each in splits.values() if each})
        raise UsageError(f"{dataset.repo}: no split '{split}'", did_you_mean(split, known))
    return found, ""


def _find_converted(api: Any, dataset: HubDataset, names: list[str], config: str, split: str) -> SplitListing:
    """Parquet files that the hub generated from the dataset."""
    from huggingface_hub import errors

    repo = dataset.repo
    script = _find_script(repo) in names
    try:
        info = api.dataset_info(repo, revision=CONVERTED, timeout=TIMEOUT_S)
    except errors.RevisionNotFoundError:
        why = "it is a program, which 'datasets' 4 and later do not run either" if script else "no file has text"
        raise UsageError(
            f"{repo}: its files cannot be read ({why}), and the hub has not converted it to parquet",
            "look for a copy of it in parquet or JSON lines, or download its text and give it with --input",
        ) from None
    # Only CONFIG/SPLIT/FILE.
    paths = [file for file in sorted(each.rfilename for each in info.siblings or ()) if file.count("/") == 2]
    config = _choose_config(repo, config, sorted({path.split("/")[0] for path in paths}), [])
    splits = {path.split("/")[1] for path in paths if path.startswith(f"{config}/")}
    folder = next((each for each in (split, PARTIAL + split) if each in splits), None)
    if folder is None:
        raise UsageError(f"{repo}: no split '{split}'", did_you_mean(split, splits))
    chosen = [path for path in paths if path.startswith(f"{config}/{folder}/") and detect_kind(path)]
    partial = " of the first 5 GB" if folder.startswith(PARTIAL) else ""
    why = "which is a program that is not run" if script else "which has no files of text"
    return SplitListing(
        repo=repo,
        revision=info.sha,
        config=config,
        split=split,
        files=_read_file_facts(api, repo, info.sha, chosen),
        text=dataset.text,
        note=f"reading the hub's own parquet files{partial} instead of {repo}, {why}",
    )


def _read_file_facts(api: Any, repo: str, revision: str, paths: list[str]) -> tuple[HubFile, ...]:
    """Size and checksum of each path."""
    found: dict[str, HubFile] = {}
    for first in range(0, len(paths), PATHS_OF_A_REQUEST):
        some = paths[first : first + PATHS_OF_A_REQUEST]
        for file in api.get_paths_info(repo, some, revision=revision, repo_type="dataset"):
            checksum = f"sha256:{file.lfs.sha256}" if file.lfs else f"git-sha1:{file.blob_id}"
            found[file.path] = HubFile(file.path, file.size, checksum)
    return tuple(found[path] for path in paths)


def _require_split(repo: str, found: list[str], config: str, split: str) -> list[str]:
    if not found:
        of = f" of '{config}'" if config else ""
        raise UsageError(f"{repo}: no files for the split '{split}'{of}", "check --split, and :CONFIG after the name")
    return found


def _choose_config(repo: str, asked: str, configs: list[str], preferred: list[str]) -> str:
    """The requested configuration, or the default one."""
    if asked and asked not in configs:
        raise UsageError(f"{repo}: no configuration '{asked}'", did_you_mean(asked, configs))
    default = preferred + [name for name in ("default",) if name in configs] + (configs if len(configs) == 1 else [])
    if not asked and not default:
        shown = ", ".join(configs[:20]) + (f" and {len(configs) - 20} more" if len(configs) > 20 else "")
        raise UsageError(
            f"{repo}: the dataset has several configurations", f"select one with {repo}:CONFIG; available: {shown}"
        )
    return asked or default[0]


def _list_configs(info: Any) -> list[CardConfig]:
    card = info.card_data.to_dict() if info.card_data else {}
    return [msgspec.convert(each, CardConfig) for each in card.get("configs") or [] if isinstance(each, dict)]


def _list_splits(data_files: object) -> dict[str, list[str]]:
    """Patterns of each split, from any form in a README: a pattern, a list of patterns, or a list with splits."""
    if isinstance(data_files, str):
        return {"train": [data_files]}
    splits: dict[str, list[str]] = {}
    for each in data_files if isinstance(data_files, list) else []:
        split, path = (each.get("split", "train"), each.get("path")) if isinstance(each, dict) else ("train", each)
        splits.setdefault(str(split), []).extend(path if isinstance(path, list) else [str(path)])
    return splits


def _match_patterns(names: list[str], patterns: list[str]) -> list[str]:
    """Names of known kinds that match any of the patterns, in order."""
    matchers: list[Callable[[str], Any]] = [re.compile(_compile_pattern(pattern)).fullmatch for pattern in patterns]
    return [name for name in names if detect_kind(name) and any(match(name) for match in matchers)]


def _compile_pattern(pattern: str) -> str:
    """Convert a pattern to a regular expression. ``*`` does not match a slash; ``**`` does."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(parts.get(part) or re.escape(part) for part in re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern))


def _detect_split(name: str) -> str:
    """Split according to the path of a file; empty if unknown."""
    words = re.split(r"[-_. /\d]+", name.lower())
    return next((split for split, names in SPLIT_NAMES.items() if set(names) & set(words)), "")


def _find_script(repo: str) -> str:
    """Name of the loading script of a dataset, which versions of 'datasets' before 4 ran."""
    return f"{repo.split('/')[-1]}.py"
