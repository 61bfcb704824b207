"""`primus-cli <runtime> [options] [-- <runtime> [options]] -- <task> [options]`: words in, exit code out."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from primus import __version__, redaction, registry
from primus.errors import (
    EXIT_FAILED,
    EXIT_OK,
    PrimusError,
    UsageError,
    describe_owner,
    escape_controls,
    format_error_place,
)
from primus.interpreter import exclude_working_folder, reduce_garbage_collection
from primus.launch import launcher_file
from primus.launch.command import GLOBAL_WORDS, parse_command
from primus.redaction import redact_args
from primus.runs.files import find_state_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `primus-cli`; gives the exit code."""
    if argv is None:
        exclude_working_folder()
        reduce_garbage_collection()
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with _missing_streams(), redaction.redirected_streams():
        redaction.learn(os.environ)
        redaction.fingerprint_key.use_folder(find_state_folder(os.environ))
        redaction.learn_args(words)
        return _run_and_report_errors(words)


@contextlib.contextmanager
def _missing_streams() -> Iterator[None]:
    """Replace standard streams that the caller has closed (`>&-`) by the null device while open."""
    if sys.stdout and sys.stderr:
        yield
        return
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as null:
        sys.stdout, sys.stderr = sys.stdout or null, sys.stderr or null
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def _run_and_report_errors(words: list[str]) -> int:
    """Run the command; reports an error as one message, or with `--debug` as a traceback. Gives the exit code."""
    try:
        code = _run_words(words, os.environ)
        sys.stdout.flush()
        if not 0 <= code <= 255:  # the operating system would keep the last 8 bits: 256 would mean success
            raise PrimusError(f"the task returned exit code {code}", "return a number from 0 to 255")
        return code
    except PrimusError as error:
        return _report_error(error, str(error), words, error.exit_code)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe.
        _discard_output()
        return EXIT_OK
    except KeyboardInterrupt as error:
        from primus.launch.signals import find_exit_code

        print("primus-cli: interrupted", file=sys.stderr)
        return find_exit_code(error)
    except Exception as error:
        if isinstance(error, OSError) and error.filename == STANDARD_OUTPUT:
            _discard_output()
        return _report_error(error, _format_unexpected_error(error), words, EXIT_FAILED)


STANDARD_OUTPUT = "<stdout>"
"""Name that Python gives to the stream."""


def _discard_output() -> None:
    """Write what is left of standard output nowhere: Python would flush it at exit, fail again and exit with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_error(error: Exception, message: str, words: list[str], exit_code: int) -> int:
    if "--debug" in words:
        import traceback

        traceback.print_exception(error)
    else:
        print(f"primus-cli: {escape_controls(_redact_words(message, words))}", file=sys.stderr)
    return exit_code


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a write, which do not name the file."""


def _format_unexpected_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        owner = f"\n  {describe_owner(Path(str(error.filename)))}" if isinstance(error, PermissionError) else ""
        return f"{error.filename}: {error.strerror}{owner}"
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"{error.strerror}\n  free space in the workspace and in the temporary folder"
    what = f"{type(error).__name__}: {error}"
    plug_in = registry.find_failing_plug_in(error)
    if plug_in and plug_in.is_origin:
        return f"the plug-in {plug_in.place} failed: {what}\n  show the traceback: add --debug"
    problem = f"internal error at {format_error_place(error)}: {what}"
    if plug_in:
        return f"{problem}\n  it was called by the plug-in {plug_in.place}; show the traceback: add --debug"
    return f"{problem}\n  report this with the traceback, which --debug shows"


def _redact_words(text: str, words: Sequence[str]) -> str:
    """`text` with each word of the command line that holds a secret masked."""
    for word, redacted in zip(words, redact_args(words), strict=True):
        text = text.replace(word, redacted) if word != redacted else text
    return text


def _run_words(words: list[str], environ: Mapping[str, str]) -> int:
    _check_dashes(words)
    unreadable = [word for word in words if not word.isascii() and not _is_unicode(word)]
    if unreadable:
        raise UsageError(f"{unreadable[0]!r} is not UTF-8 text")
    ours, choice = launcher_file.take_choice(words)
    first = next((word for word in ours if word not in GLOBAL_WORDS), "--help")
    if first in ("-h", "--help", "help"):
        from primus.cli import help_text

        print(help_text.format_overview())
        return EXIT_OK
    if first in ("--version", "-V", "version"):
        print(f"primus {__version__}")
        return EXIT_OK
    if first == "completion":
        from primus.cli import completion

        return completion.run(words[words.index(first) + 1 :])
    command = parse_command(ours)
    if command.is_help:
        from primus.cli import help_text

        print(help_text.format_help(command.request))
        return EXIT_OK
    if command.notes and not command.options.dry_run:  # a dry run lists its notes
        print(*(f"primus-cli: {note}" for note in command.notes), sep="\n", file=sys.stderr)
    from primus.cli.dispatch import run_command  # help and --version need no plan, and start in half the time

    return run_command(launcher_file.apply_defaults(command, choice, environ), tuple(words), environ)


_DASHED_OPTION = re.compile("(?P<dashes>[-\u2010-\u2015\u2212]+)(?P<name>[A-Za-z][\\w.-]*)(=.*)?", re.DOTALL)


def _check_dashes(words: Sequence[str]) -> None:
    """Refuse options that begin with a dash of a word processor or a web page, which is not the hyphen of options."""
    for word in words:
        match = _DASHED_OPTION.fullmatch(word)
        if match and match["dashes"].strip("-"):
            hyphens = "-" if len(match["name"]) == 1 else "--"
            raise UsageError(
                f"{word}: an option begins with hyphens, not with a dash", f"type {hyphens}{match['name']}"
            )


def _is_unicode(word: str) -> bool:
    try:
        return bool(word.encode())
    except UnicodeEncodeError:
        return False


if __name__ == "__main__":
    sys.exit(main())
