"""Files that come with primus: its examples and changelog, and the checkout that it runs from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from primus.errors import UsageError, did_you_mean

PACKAGE = Path(__file__).parent
EXAMPLES = PACKAGE / "examples"
"""Folder of the examples; in a checkout a link to that at its root, as the changelog and the constraints are links."""
CHANGELOG = PACKAGE / "CHANGELOG.md"
CHECKOUT = PACKAGE.parents[1] if (PACKAGE.parents[1] / "primus-cli").is_file() else None
"""Folder of the checkout; None for an installed package."""
PROGRAM = "primus-cli" if CHECKOUT is None else "./primus-cli"
"""How users start primus, for messages."""

EXAMPLE_PREFIX = "examples:"
"""Begins the name of an example where a file is expected: `--config examples:quickstart`."""
EXAMPLES_VARIABLE = "PRIMUS_EXAMPLES"
"""Variable that is the folder of the examples where one is read by its name: `${PRIMUS_EXAMPLES:examples}/FILE`."""
SUFFIXES = (".yaml", ".toml")


def locate_config(file: Path) -> Path:
    """The file of an experiment or matrix: `file`, or the example that it names as `examples:NAME`.

    Raises:
        UsageError: There is no such example.
    """
    return find_example(str(file)) if str(file).startswith(EXAMPLE_PREFIX) else file


def name_examples_folder(environ: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """`environ` for reading an example that is named, with the folder that its data are in."""
    return None if environ is None else {**environ, EXAMPLES_VARIABLE: os.path.realpath(EXAMPLES)}


def find_example(name: str) -> Path:
    """File of the example `NAME` or `examples:NAME`; the suffix may be left out.

    Raises:
        UsageError: There is no such example; the message names the nearest.
    """
    wanted = name.removeprefix(EXAMPLE_PREFIX)
    files = dict(list_examples())
    found = files.get(os.path.splitext(wanted)[0] if wanted.endswith(SUFFIXES) else wanted)
    if found is None:
        raise UsageError(f"no example '{wanted}'", did_you_mean(wanted, files))
    return found


def list_examples() -> Iterator[tuple[str, Path]]:
    """Name and file of each example that a `--config` or `--matrix` takes, in order."""
    root = Path(os.path.realpath(EXAMPLES))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(each for each in folders if each not in ("plug-ins", "tokenizer"))
        for file in sorted(files):
            if file.endswith(SUFFIXES):
                path = Path(folder, file)
                yield os.path.relpath(path.with_suffix(""), root), path
