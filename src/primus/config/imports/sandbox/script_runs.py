"""Run one script several times, each time with other facts about its cluster, and with what it reads from here."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct, structs

from primus.config.imports.sandbox.run_script import LIMIT_S, RunRecord, RunRequest, RunResult, run_script
from primus.config.imports.sandbox.trace import INSIDE, TOKEN_LENGTH, list_missing, list_tests, list_trace

Arguments = Mapping[str, tuple[str, ...]]
"""Values by argument of the command that is looked for."""
CLUSTER = re.compile(
    r"(SLURM|PBS|LSB|OMPI|PMI|PMIX|PET|FLUX|COBALT|MLP_(?:WORKER|ROLE|GPU|MPI)|ARNOLD|VC|KUBERNETES|TORCHELASTIC|AIP|SM)_\w+"
    r"|(LOCAL_|GROUP_|NODE_|GLOBAL_)?RANK|(LOCAL_)?WORLD_SIZE|NNODES|NUM_NODES|MASTER_(ADDR|PORT)|HOSTNAME|HOST"
    r"|(CUDA|HIP|ROCR|ASCEND_RT)_VISIBLE_DEVICES|(NPROC|GPUS?|NUM_GPUS)_PER_NODE|NUM_GPUS|NGPUS|TMPDIR"
)
"""Variables that a scheduler or launcher sets."""
_NAMES = ("NODELIST", "ADDR", "HOST", "HOSTNAME", "NAME", "PARTITION", "ACCOUNT", "DIR", "FILE", "HOSTS")
"""Last words of variables that hold names; others hold numbers."""
_BASH_OWN = re.compile(r"PATH|PWD|OLDPWD|SHLVL|IFS|ENV|PS\d|LD_\w+|LC_\w+|LANG|BASH\w*|SHELLOPTS|_")
"""Variables with a meaning for bash or the loader; the sandbox sets what is needed."""
_VARIABLE = re.compile(r"\$\{?#?!?([A-Za-z_]\w*)")
_READABLE = set(".sh .bash .slurm .sbatch .job .conf .cfg .txt .args .inc .rc .config".split()) | {""}
"""Suffixes of files next to the script that it may read."""
LARGEST_FILE = 256 << 10
MOST_ROUNDS = 6
"""Runs in which files and folders that the script asks for are added."""
BUDGET_S = 20.0
"""Processor time of all runs, which does not depend on what else the machine does."""
MOST_CWDS = 8


class RunState(Struct, frozen=True):
    """The facts of one run."""

    answer: str = "1"
    """What every unknown command prints; see `RunRequest`."""
    answers: dict[str, str] = {}
    variables: dict[str, str] = {}
    present: tuple[str, ...] = ()
    """Files that exist."""
    args: tuple[str, ...] | None = None
    """Arguments of the script; None for those that were given."""
    has_files: bool = False
    """Whether every file exists that the script asks for."""
    is_lenient: bool = False
    """Whether the script goes on after an error where it would end."""


class ScriptRun(Struct, frozen=True):
    """One run, and the arguments of the command that is looked for; None if it was not reached."""

    state: RunState
    result: RunResult
    arguments: Arguments | None


class ScriptRunner:
    """Runs a script; what a run misses and is here, all later runs have.

    Args:
        text: The script.
        path: Its file; other scripts in the same folder or checkout may be read by it.
        args: Its arguments.
        environ: Variables of this shell that it may see; secrets must be taken out before.
        choose: The arguments of the command that is looked for, from the commands that a run called.
    """

    def __init__(
        self,
        text: str,
        path: Path,
        args: tuple[str, ...],
        environ: Mapping[str, str],
        choose: Callable[[list[RunRecord]], Arguments | None],
    ) -> None:
        self.path = str(path.absolute())
        self.folder = os.path.dirname(self.path)
        self.roots = _find_roots(path)
        self.cwd = self.folder
        """Folder in which the script is started."""
        self.args = args
        self.choose = choose
        self.files = {self.path: text}
        self.folders: dict[str, None] = {}
        self.programs: dict[str, None] = {}
        self.environ = dict(environ)
        self.commands: dict[str, str] = {}
        """Commands by their first letters, which tokens hold."""
        self.begin_s = _get_processor_time_s()
        self.num_late = 0
        self.num_runs = 0
        self.is_cut = False
        """Whether time was too short for all runs."""

    @property
    def text(self) -> str:
        """Text of the script and of all that it reads."""
        return "\n".join(self.files.values())

    def run(self, state: RunState, hidden: str = "") -> ScriptRun:
        """One run; files and folders that it misses are added where they are here, and it runs again.

        Args:
            state: The facts.
            hidden: A variable of this shell that the script does not see.
        """
        result = RunResult()
        for _ in range(MOST_ROUNDS):
            # A run that only waits takes no processor time; it counts as long as it may last.
            if _get_processor_time_s() - self.begin_s + self.num_late * LIMIT_S > BUDGET_S:
                self.is_cut = True
                break
            result = run_script(self._make_request(state, hidden))
            self.num_late += result.is_late
            is_new = self._add_missing(result)
            if state.has_files:
                tests = list_tests(result)
                is_new = is_new or not {*tests} <= {*state.present}
                state = structs.replace(state, present=tuple(dict.fromkeys([*state.present, *tests])))
            if result.unavailable or not is_new:
                break
        for record in result.records:
            command = " ".join(record.words)
            self.commands.setdefault(command[:TOKEN_LENGTH], command)
        return ScriptRun(state, result, self.choose(result.records))

    def run_all(self, states: Iterable[RunState]) -> list[ScriptRun]:
        """Several runs at a time."""
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self.run, states))

    def list_shell_variables(self) -> list[str]:
        """Variables of this shell that the script names."""
        names = {"HOME", *re.findall(r"[A-Za-z_]\w*", self.text)}
        return [name for name in self.environ if name in names and not _BASH_OWN.fullmatch(name)]

    def list_cluster_variables(self) -> list[str]:
        """Variables of a job that the script names."""
        names = dict.fromkeys(_VARIABLE.findall(self.text))
        return [name for name in names if CLUSTER.fullmatch(name) and name not in self.environ]

    def _make_request(self, state: RunState, hidden: str) -> RunRequest:
        self.num_runs += 1
        job = {name: state.variables.get(name, make_value(name, "1")) for name in self.list_cluster_variables()}
        shell = {name: self.environ[name] for name in self.list_shell_variables() if name != hidden}
        return RunRequest(
            argv=[self.path, *(self.args if state.args is None else state.args)],
            cwd=self.cwd,
            files={**dict.fromkeys((path for path in state.present if path not in self.files), "1\n"), **self.files},
            folders=list(self.folders),
            programs=list(self.programs),
            environ=shell | state.variables,
            job=job,
            answer=state.answer,
            answers=state.answers,
            is_lenient=state.is_lenient,
            shift=self.num_runs % 7,
        )

    def _add_missing(self, result: RunResult) -> bool:
        """Add what a run missed or asked for, and is here; whether there was anything new."""
        before = (len(self.files), len(self.folders), len(self.programs))
        cwds = list(dict.fromkeys(entry["cwd"] for entry in list_trace(result)))[:MOST_CWDS] or [self.folder]
        for match in list_missing(result):
            name = match["path"]
            for path in (os.path.normpath(os.path.join(cwd, name)) for cwd in cwds):
                if match["folder"]:
                    self.folders[path] = None
                    continue
                text = self._read_file(path)
                if text is not None:
                    self.files[path] = text
                else:
                    self.folders[os.path.dirname(path)] = None
            if "/" in name and not match["folder"] and re.fullmatch(r"[\w./+@-]+", name):
                self.programs[name] = None
        for path in list_tests(result):
            file = self._resolve(Path(path.removesuffix(INSIDE)))
            if file and file.is_dir():
                self.folders[path.removesuffix(INSIDE)] = None
            elif file and path not in self.files:
                self.files[path] = self._read_file(path) or "1\n"
        return before != (len(self.files), len(self.folders), len(self.programs))

    def _read_file(self, path: str) -> str | None:
        """Text of a file of the script's folder or checkout; None if it is not one that it may read."""
        relative = os.path.relpath(path, self.cwd)
        paths = [Path(path)] if relative.startswith("..") else [root / relative for root in self.roots]
        file = next(filter(None, map(self._resolve, paths)), None)
        try:
            if file and file.suffix in _READABLE and file.stat().st_size <= LARGEST_FILE:
                return file.read_text(encoding="utf-8").replace("\r\n", "\n")
        except (OSError, ValueError):
            pass
        return None

    def _resolve(self, path: Path) -> Path | None:
        """A file or folder of the script's folder or checkout; None if it is not there, or hidden."""
        try:
            real = path.resolve()
            is_hidden = any(part.startswith(".") for part in real.relative_to(self.roots[-1]).parts)
            return real if not is_hidden and real.exists() else None
        except (OSError, ValueError):
            return None


def _get_processor_time_s() -> float:
    """Processor time of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _find_roots(path: Path) -> list[Path]:
    """Folders in which a script may read others: its own, and that of its checkout last."""
    folders = list_checkout_folders(path)
    return [folders[0], *folders[1:][-1:]]


def list_checkout_folders(path: Path) -> tuple[Path, ...]:
    """The folder of a script, and those above it up to that of its checkout; the first one alone without a checkout."""
    folder = path.absolute().parent.resolve()
    above = list(folder.parents)
    end = next((at for at, each in enumerate(above) if (each / ".git").exists()), -1)
    return (folder, *above[: end + 1])


def make_value(name: str, number: str) -> str:
    """A value for a variable of a job: a number, or a name."""
    return f"node{number}" if name.endswith(_NAMES) else number


def list_differences(base: ScriptRun, other: ScriptRun) -> list[str]:
    """Arguments that differ between two runs that both reached the command."""
    if base.arguments is None or other.arguments is None:
        return []
    names = dict.fromkeys([*base.arguments, *other.arguments])
    return [name for name in names if base.arguments.get(name) != other.arguments.get(name)]
