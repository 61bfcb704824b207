"""Count the files and functions of primus that a command runs through in the launcher, and print the path.

    python tools/launcher_files.py
    python tools/launcher_files.py --path -- direct -- train pretrain --config examples/quickstart.yaml

Without a command it measures the two of `COMMANDS`. The count begins before `primus.cli.main` is imported and ends
where the first worker process would start; it is not started. A command without workers is counted to its end. A
function counts once however often it is called, in any thread. Bodies of modules and classes, comprehensions and
generator expressions are not functions.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "src/primus"
EXPERIMENT = str(PACKAGE.parents[1] / "examples/quickstart.yaml")
QUICK_START = ("direct", "--", "train", "pretrain", "--config", EXPERIMENT)
SBATCH_DRY_RUN = ("--dry-run", "slurm", "sbatch", "-N", "2", "--", "train", "pretrain", "--config", EXPERIMENT)
COMMANDS = {"quick start": QUICK_START, "dry run of sbatch": SBATCH_DRY_RUN}
WORKER_MODULES = ("primus.worker", "primus.elastic_agent")
NO_FUNCTIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "__getattr__")
"""Parts of functions, and what the interpreter asks of `primus` before it imports a module of it."""


class FileVisit:
    """A file on the path, with the files that it calls, in the order of their first call."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.functions: dict[str, int] = {}
        """Number of calls from the file above, by name of the function."""
        self.visits: dict[str, FileVisit] = {}

    def enter(self, code: CodeType) -> FileVisit:
        """The visit of the file of `code`, which is called from this file."""
        file = os.path.relpath(code.co_filename, PACKAGE)
        visit = self if file == self.file else self.visits.setdefault(file, FileVisit(file))
        if visit is not self:
            name = _format_name(code)
            visit.functions[name] = visit.functions.get(name, 0) + 1
        return visit

    def format_path(self, depth: int = 0) -> list[str]:
        """The files of the path, each indented below the one that calls it."""
        names = [name if count == 1 else f"{name} x{count}" for name, count in self.functions.items()]
        below = [line for visit in self.visits.values() for line in visit.format_path(depth + 1)]
        return [f"{'  ' * depth}{self.file}: {', '.join(names)}", *below]


class WorkersStart(BaseException):
    """The launcher is about to start worker processes; not an error that it handles."""


class CallRecorder:
    """Records which functions of the package are called, until workers start."""

    def __init__(self) -> None:
        self.root = FileVisit("command line")
        self.functions: set[tuple[str, int, str]] = set()
        """File, line and name."""
        self._threads = threading.local()
        sys.addaudithook(self._stop_at_workers)

    def start(self) -> None:
        """Record from here on."""
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def stop(self) -> None:
        """Record no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _stop_at_workers(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and any(str(word) in WORKER_MODULES for word in args[1]):
            self.stop()
            raise WorkersStart

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        if not hasattr(self._threads, "visits"):
            self._threads.visits = [self.root]
        visits: list[FileVisit] = self._threads.visits
        if event == "return":
            if len(visits) > 1:  # else it returns from a function that was called before the start
                visits.pop()
            return
        code, visit = frame.f_code, visits[-1]
        if _is_function(code):
            self.functions.add((code.co_filename, code.co_firstlineno, code.co_name))
            visit = visit.enter(code)
        visits.append(visit)


def _format_name(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name))  # Python 3.10 has only the short name


def _is_function(code: CodeType) -> bool:
    is_ours = code.co_filename.startswith(f"{PACKAGE}{os.sep}")
    return is_ours and bool(code.co_flags & inspect.CO_NEWLOCALS) and code.co_name not in NO_FUNCTIONS


def count_functions(command: tuple[str, ...]) -> dict[str, Any]:
    """The files and functions that `command` runs through in a process of its own, the path as text, and the modules of
    the package that it has imported."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "HOME": folder, "PYTHONPATH": str(PACKAGE.parent)}
        argv = [sys.executable, __file__, "--in-this-process", "--", *command]
        answer = subprocess.run(argv, env=environ, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def _record_command(command: list[str]) -> dict[str, Any]:
    sys.argv[1:] = command
    recorder = CallRecorder()
    recorder.start()
    from primus.cli.main import main

    try:
        code = main()
    except WorkersStart:
        code = 0
    finally:
        recorder.stop()
    if code:
        sys.exit(code)
    files = {os.path.relpath(file, PACKAGE) for file, _, _ in recorder.functions}
    modules = sorted(name for name in sys.modules if name.startswith("primus."))
    path = "\n".join(line for visit in recorder.root.visits.values() for line in visit.format_path())
    return {"files": sorted(files), "functions": len(recorder.functions), "modules": modules, "path": path}


def main() -> None:
    """Measure the commands, and print what they run through."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", action="store_true", help="print the files in the order of their calls")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="words of primus-cli, after --")
    given = parser.parse_args()
    if given.in_this_process:
        print(json.dumps(_record_command(given.command)))
        return
    for name, command in {"command": tuple(given.command)}.items() if given.command else COMMANDS.items():
        found = count_functions(command)
        print(f"{name}: {len(found['files'])} files, {found['functions']} functions")
        if given.path:
            print(found["path"])


if __name__ == "__main__":
    main()
