"""Report an engine that fails on import by its own error in one line, instead of a crash of the training code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from primus.errors import PrimusError, UnfitError, is_raised_on_import
from primus.package_files import PROGRAM


@contextlib.contextmanager
def explain_import_errors(names: Sequence[str]) -> Iterator[None]:
    """Turn an error during the import of a package, by a framework that drives the engines `names`, into one message.

    The traceback goes to standard error, which is the log of the rank.

    Raises:
        UnfitError: A package cannot be imported. It is not retryable.
    """
    try:
        yield
    except PrimusError:
        raise
    except Exception as error:
        if not names or not (isinstance(error, ImportError) or is_raised_on_import(error)):
            raise
        traceback.print_exc()
        problem = "needs what is not installed" if _is_raised_in_function(error) else "cannot be imported"
        raise UnfitError(
            f"{_describe_engine(names[0])} {problem}: {_format_error(error)}",
            f"the traceback is in the log of the rank; {PROGRAM} setup --engine {names[0]} installs its environment",
        ) from error


def _is_raised_in_function(error: BaseException) -> bool:
    """Whether a function of a package imports what is missing, when it is called."""
    code = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = next(each for each in reversed(code) if not each.co_filename.startswith("<frozen importlib"))
    own = Path(__file__).parents[1]
    return not is_raised_on_import(error) and not Path(innermost.co_filename).is_relative_to(own)


def _describe_engine(name: str) -> str:
    from primus.engines.installation import find_installation  # for the message only
    from primus.engines.requirement import read_engine

    engine = read_engine(name)
    found = find_installation(name, engine, os.environ)
    version = f" {found.version}" if found and found.version else ""
    return f"{engine.title}{version} of {sys.prefix}"


def _format_error(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
