"""One run of a script in the sandbox: what its commands from outside are told, and which it calls."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct, field

_PROGRAM = Path(__file__).with_name("isolate.py")
_RECORDER = Path(__file__).with_name("record_commands.bash")
TOOLS = (
    "awk basename bc cat chmod cp cut dirname expr gawk getopt grep egrep head ln mkdir mktemp mv paste readlink "
    "realpath rev rm rmdir sed seq sort tail tee touch tr uniq wc"
).split()
"""Programs of the machine that a script may really run: they compute text, or make files in the sandbox's memory."""
LIMIT_S = 4.0
"""Longest run on an idle machine."""
_MOST_SLOWDOWN = 8.0
_ANSWER_LIMIT_S = 6.0
"""Time beyond that in which the sandbox is built and its answer is read."""
MOST_PROCESSES = 64
_NAMESPACED_LIMITS = (5, 14)
"""Version of Linux from which the number of processes is counted for each user namespace (user_namespaces(7))."""
_EXEC = re.compile(
    r"^((?:.*(?:;|&&|\|\||\bthen|\bdo|\belse|\{))?[ \t]*)exec[ \t]+(?=[\"'$\w./])(?!\d*[<>])", re.MULTILINE
)


class RunRequest(Struct, frozen=True, kw_only=True):
    """What a script finds."""

    argv: list[str]
    """The script and its arguments."""
    cwd: str
    files: dict[str, str]
    """Text by path; the script is one of them."""
    folders: list[str] = []
    programs: list[str] = []
    """Commands that are called by their path."""
    environ: dict[str, str] = {}
    job: dict[str, str] = {}
    """Variables that a job has which the script submits."""
    answer: str = "1"
    """What each unknown command prints: a text, `large`, `lines`, `token`, or `none`, which fails."""
    answers: dict[str, str] = {}
    """The same for single commands, by their words."""
    is_lenient: bool = False
    """Whether a script that ends at its first error (`set -eu`) goes on."""
    shift: int = 0
    """Number by which process ids are shifted."""


class RunRecord(Struct, frozen=True):
    """A command that a script called."""

    line: int
    cwd: str
    words: list[str]


class RunResult(Struct, frozen=True):
    """What bash did."""

    unavailable: str = ""
    """Why the sandbox could not be had; all else is empty then."""
    status: int = 0
    is_late: bool = False
    """Whether it was stopped at the time limit."""
    records: list[RunRecord] = field(default_factory=list)
    trace: str = ""
    errors: str = ""


class _Answer(Struct):
    unavailable: str = ""
    status: int = 0
    is_late: bool = False
    records: list[str] = []
    trace: str = ""
    errors: str = ""


def get_limit_s() -> float:
    """Longest run on this machine now: processes that wait for a processor make it longer."""
    return LIMIT_S * min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), _MOST_SLOWDOWN)


def run_script(request: RunRequest) -> RunResult:
    """Run a script in the sandbox; see `isolate.py` for what bounds it."""
    bash = shutil.which("bash")
    if not sys.platform.startswith("linux") or bash is None:
        return RunResult(unavailable="it needs bash on Linux")
    binaries = _list_binaries()
    folders = dict.fromkeys(os.path.dirname(path) for path in binaries if os.path.basename(path) in TOOLS)
    limit_s = get_limit_s()
    environ = {
        "PATH": os.pathsep.join(folders),
        "BASH_ENV": "/.primus/record_commands.bash",
        "SHLVL": "0",
        "LC_ALL": "C",
        **request.environ,
    }
    body = {
        "binaries": binaries,
        "argv": [bash, *request.argv],
        "cwd": request.cwd,
        "folders": [request.cwd, *request.folders],
        "files": {path: _rename_exec(text) for path, text in request.files.items()}
        | {"/.primus/record_commands.bash": _RECORDER.read_text(), "/.primus/answers": _format_answers(request, bash)},
        "environ": environ,
        "shift": request.shift,
        "limit_s": limit_s,
        "processes": MOST_PROCESSES + _count_processes(),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            input=json.dumps(body).encode(),
            capture_output=True,
            env={"LC_ALL": "C"},
            cwd="/",
            timeout=limit_s + _ANSWER_LIMIT_S * (limit_s / LIMIT_S),
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return RunResult(unavailable=str(error))
    try:
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except msgspec.MsgspecError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return RunResult(unavailable=lines[-1] if lines else f"it ended with {done.returncode}")
    if answer.status in (99, 126) and not answer.records:
        return RunResult(unavailable="it needs bash 4.4")
    records = [_parse_record(text) for text in answer.records if text.count("\0") > 2]
    return RunResult(answer.unavailable, answer.status, answer.is_late, records, answer.trace, answer.errors)


def _parse_record(text: str) -> RunRecord:
    line, cwd, *words = text.removesuffix("\0").split("\0")
    return RunRecord(int(line) if line.isdigit() else 0, cwd, words)


def _rename_exec(text: str) -> str:
    """`text` where `exec COMMAND` is a call of the recorder; `exec` with redirections alone stays what it is."""
    return _EXEC.sub(r"\1__primus_exec ", text)


def _format_answers(request: RunRequest, bash: str) -> str:
    """The file of values that the recorder reads."""
    answers = " ".join(f"[{_quote(key)}]={_quote(value)}" for key, value in request.answers.items())
    job = " ".join(_quote(f"{name}={value}") for name, value in request.job.items())
    programs = " ".join(_quote(each) for each in request.programs)
    return (
        f"__primus_bash={_quote(bash)}\n__primus_mode={_quote(request.answer)}\n"
        f"declare -A __primus_answers=({answers})\n"
        f"__primus_step={_quote('set -x +eu' if request.is_lenient else 'set -x')}\n"
        f"__primus_job=({job})\n__primus_programs=({programs})\n"
    )


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@cache
def _list_binaries() -> list[str]:
    """Paths of bash, the tools, and the libraries that the loader finds for them (ld.so(8))."""
    found: dict[str, None] = {}
    programs = [path for path in map(shutil.which, ("bash", *TOOLS)) if path]
    for program in programs:
        found[program] = None
        with subprocess.Popen(
            [program],
            env={"LD_TRACE_LOADED_OBJECTS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            listed = process.communicate()[0].decode(errors="replace")
        found |= dict.fromkeys(re.findall(r"(/\S+) \(0x[0-9a-f]+\)", listed))
    return [path for path in (*found, "/etc/ld.so.cache") if os.path.isfile(path)]


def _count_processes() -> int:
    """Threads that count against this user's limit in the sandbox: none, except on older kernels."""
    version = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if version >= _NAMESPACED_LIMITS:
        return 0
    user = os.getuid()
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            count += len(os.listdir(folder / "task")) if folder.stat().st_uid == user else 0
        except OSError:
            continue
    return count
