"""Find what a script does in any case, and what depends on facts that only its cluster knows.

The script runs several times in the sandbox. In the first run no argument is given, a variable of a job is not set, a
file that is not here does not exist, and each command from outside prints 1. In the other runs these facts are
different: commands print a large number, several lines or nothing and fail, variables of a job have values, tested
files exist. In one run each fact is a text that names it, so that the facts in a value, and what they are compared
with, are seen; each such comparison is tried, too. Arguments that are equal in all runs are certain.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct, field, structs

from primus.config.imports.sandbox.run_script import LIMIT_S, RunRecord, RunRequest, RunResult, run_script

Arguments = Mapping[str, tuple[str, ...]]
"""Values by argument of the command that is looked for."""
_CLUSTER = re.compile(
    r"(SLURM|PBS|LSB|OMPI|PMI|PMIX|PET|FLUX|COBALT|MLP_(?:WORKER|ROLE|GPU|MPI)|ARNOLD|VC|KUBERNETES|TORCHELASTIC|AIP|SM)_\w+"
    r"|(LOCAL_|GROUP_|NODE_|GLOBAL_)?RANK|(LOCAL_)?WORLD_SIZE|NNODES|NUM_NODES|MASTER_(ADDR|PORT)|HOSTNAME|HOST"
    r"|(CUDA|HIP|ROCR|ASCEND_RT)_VISIBLE_DEVICES|(NPROC|GPUS?|NUM_GPUS)_PER_NODE|NUM_GPUS|NGPUS|TMPDIR"
)
"""Variables that a scheduler or launcher sets."""
_NAMES = ("NODELIST", "ADDR", "HOST", "HOSTNAME", "NAME", "PARTITION", "ACCOUNT", "DIR", "FILE", "HOSTS")
"""Last words of variables that hold names; others hold numbers."""
_BASH_OWN = re.compile(r"PATH|PWD|OLDPWD|SHLVL|IFS|ENV|PS\d|LD_\w+|LC_\w+|LANG|BASH\w*|SHELLOPTS|_")
"""Variables with a meaning for bash or the loader; the sandbox sets what is needed."""
_OWN = ("HOME", "USER", "LOGNAME")
"""Variables of the shell that a script may use without a note."""
_VARIABLE = re.compile(r"\$\{?#?!?([A-Za-z_]\w*)")
_PLAIN_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)\}")
_PLACEHOLDER = re.compile(r"(?<==)<[^<>\n]+>[\w./-]*")
_STRICT = re.compile(r"\bset -\w*[eu]|\bset -o (?:errexit|nounset)|^#!.* -\w*[eu]")
_ARGUMENT = re.compile(r"\$\{?#?([1-9@*])|\$#")
_MISSING = re.compile(
    r"^(?P<shell>.+?): (?:line (?P<line>\d+): )?(?P<folder>cd: |pushd: )?(?:[\w.]+: )?(?P<path>[^:]+?)"
    r"(?:: .* bad interpreter)?: (?:No such file or directory|Not a directory)$"
)
_TRACE = re.compile("^\\++\x01(?P<source>[^\x01]*)\x01(?P<line>\\d*)\x01(?P<cwd>[^\x01]*)\x01 (?P<text>.*)$")
_FILE_TEST = re.compile(r"(?<!\S)-(?P<kind>[defrswxLhN]) (?P<path>'[^']*'|[^\s;]+)")
_INSIDE = "/.here"
"""A file in a folder that is to exist."""
_COMPARISON = re.compile(
    r"(?P<left>\S+) (?:=|==|!=|=~|-eq|-ne|-lt|-le|-gt|-ge|<|>) (?P<right>'[^']*'|\S+)",
)
_TOKEN = re.compile(r"primus_(?P<kind>fact|var|arg)_(?P<name>\w+?)_(?![A-Za-z0-9])")
_READABLE = set(".sh .bash .slurm .sbatch .job .conf .cfg .txt .args .inc .rc .config".split()) | {""}
"""Suffixes of files next to the script that it may read."""
LONGEST_LINE = 16 << 10
"""Characters of a traced command; longer ones hold data, not conditions."""
LONGEST_CONDITION = 1000
LARGEST_FILE = 256 << 10
TOKEN_LENGTH = 40
"""Letters of a command in its token; that of the recorder."""
MOST_ROUNDS = 6
"""Runs in which files and folders that the script asks for are added."""
MOST_FACTS = 24
"""Facts that are changed one by one."""
BUDGET_S = 20.0
_ENVIRONMENTS = re.compile(r"activate|conda\.sh|\.?bash(rc|_profile)|\.?profile|setvars\.sh|set_env\.sh|bash")
"""Files that set up programs, not a training."""


class Doubt(Struct):
    """An argument that is not the same in all runs."""

    name: str
    values: list[tuple[str, ...] | None]
    """What it was, the first run's value first; None where it was absent."""
    facts: list[str]
    """What it depends on, as a person says it."""
    is_kept: bool
    """Whether the first run's value holds as long as nothing is set or there: else it is a guess."""


class Note(Struct, frozen=True):
    """Something about the script that a reader of the result has to know."""

    subject: str
    text: str


class ScriptProbe(Struct):
    """What the runs of a script showed."""

    unavailable: str = ""
    """Why there is no sandbox; all else is empty then."""
    arguments: Arguments | None = None
    """Those of the first run that reached the command; None if none did."""
    commands: list[RunRecord] = field(default_factory=list)
    """Commands of that run."""
    doubts: list[Doubt] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    candidates: dict[str, list[str]] = field(default_factory=dict)
    """What the script compares each of its arguments with."""
    errors: list[str] = field(default_factory=list)
    """What bash said in that run."""
    trace: list[str] = field(default_factory=list)
    """Commands of that run as bash executed them."""


class _Fact(Struct, frozen=True):
    kind: str
    """`command`, `variable`, `file` or `argument`."""
    name: str

    def describe(self) -> str:
        forms = {"command": "$({})", "variable": "${}", "file": "whether {} exists", "argument": "its argument ${}"}
        return forms[self.kind].format(self.name.removesuffix(_INSIDE))


class _State(Struct, frozen=True):
    """The facts of one run."""

    answer: str = "1"
    answers: dict[str, str] = {}
    variables: dict[str, str] = {}
    present: tuple[str, ...] = ()
    args: tuple[str, ...] | None = None
    has_files: bool = False
    """Whether every file exists that the script asks for."""
    is_lenient: bool = False


class _Run(Struct, frozen=True):
    state: _State
    result: RunResult
    arguments: Arguments | None


def probe_script(
    text: str,
    path: Path,
    args: tuple[str, ...],
    environ: Mapping[str, str],
    choose: Callable[[list[RunRecord]], Arguments | None],
) -> ScriptProbe:
    """Run a script in the sandbox until it is known what its command depends on.

    Args:
        text: The script.
        path: Its file; other scripts in the same folder or checkout may be read by it.
        args: Its arguments.
        environ: Variables of this shell that it may see; secrets must be taken out before.
        choose: The arguments of the command that is looked for, from the commands that a run called.
    """
    return _Probe(text, path, args, environ, choose).probe()


class _Probe:
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
        self.args = args
        self.choose = choose
        self.files = {self.path: text}
        self.folders: dict[str, None] = {}
        self.programs: dict[str, None] = {}
        self.environ = dict(environ)
        self.commands: dict[str, str] = {}
        self.end = time.monotonic() + BUDGET_S
        self.runs = 0
        self.is_cut = False

    def probe(self) -> ScriptProbe:
        first = self.run(_State())
        if first.result.unavailable:
            return ScriptProbe(unavailable=first.result.unavailable)
        placeholders = self.quote_placeholders() if ": syntax error" in first.result.errors else []
        if placeholders:
            first = self.run(_State())
        token = self.run(self.make_token_state())
        groups = [first, token, *self.run_all(self.list_groups())]
        base = next((run for run in groups if run.arguments and run is not token), first)
        if base.arguments is None and _STRICT.search(self.files[self.path]):
            base = self.run(_State(is_lenient=True))
        probe = ScriptProbe(
            arguments=base.arguments,
            commands=base.result.records,
            errors=[_strip_shell(line) for line in base.result.errors.splitlines()],
            trace=[entry["text"] for entry in _list_trace(base.result)],
        )
        probe.notes += [Note(text, "is a placeholder; write its value into the script") for text in placeholders]
        probe.notes += self.list_missing(base)
        if base.state.has_files and (files := _list_tests(base.result)):
            shown = ", ".join(path.removesuffix(_INSIDE) for path in files[:8])
            probe.notes.append(Note("the script", f"read as if these exist, without which it trains nothing: {shown}"))
        if base.state.variables:
            probe.notes.append(Note("the script", f"read as a job, without which it trains nothing: {_format(base)}"))
        if base.state.is_lenient and probe.errors:
            probe.notes.append(
                Note("the script", f"ends at an error here, which is passed over: {probe.errors[0][:200]}")
            )
        if base.result.is_late:
            probe.notes.append(Note("the script", f"did not end within {LIMIT_S:g} s; what it does later is not known"))
        self.add_doubts(probe, base, token, groups)
        self.add_inputs(probe, base)
        if self.is_cut:
            text = f"takes more than {BUDGET_S:g} s to try: some of what depends on the cluster may not be found"
            probe.notes.append(Note("the script", text))
        return probe

    def quote_placeholders(self) -> list[str]:
        """Quote values such as `<path to data>`, which bash takes for redirections; the values."""
        found = _PLACEHOLDER.findall(self.files[self.path])
        self.files[self.path] = _PLACEHOLDER.sub(lambda match: f"'{match[0]}'", self.files[self.path])
        return found

    # Runs

    def run(self, state: _State) -> _Run:
        """One run; files and folders that it misses are added where they are here, and it runs again."""
        result = RunResult()
        for _ in range(MOST_ROUNDS):
            if time.monotonic() > self.end:
                self.is_cut = True
                break
            result = run_script(self.make_request(state))
            is_new = self.add_missing(result)
            if state.has_files:
                tests = _list_tests(result)
                is_new = is_new or not {*tests} <= {*state.present}
                state = structs.replace(state, present=tuple(dict.fromkeys([*state.present, *tests])))
            if result.unavailable or not is_new:
                break
        for record in result.records:
            command = " ".join(record.words)
            self.commands.setdefault(command[:TOKEN_LENGTH], command)
        return _Run(state, result, self.choose(result.records))

    def run_all(self, states: Iterable[_State]) -> list[_Run]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self.run, states))

    def make_request(self, state: _State) -> RunRequest:
        self.runs += 1
        job = {name: state.variables.get(name, _make_value(name, "1")) for name in self.list_cluster_variables()}
        return RunRequest(
            argv=[self.path, *(self.args if state.args is None else state.args)],
            cwd=self.folder,
            files={**dict.fromkeys((path for path in state.present if path not in self.files), "1\n"), **self.files},
            folders=list(self.folders),
            programs=list(self.programs),
            environ={name: self.environ[name] for name in self.list_shell_variables()} | state.variables,
            job=job,
            answer=state.answer,
            answers=state.answers,
            is_lenient=state.is_lenient,
            shift=self.runs % 7,
        )

    def add_missing(self, result: RunResult) -> bool:
        """Add what a run missed; whether there was anything new."""
        before = (len(self.files), len(self.folders), len(self.programs))
        cwds = list(dict.fromkeys(entry["cwd"] for entry in _list_trace(result)))[:8] or [self.folder]
        for match in _list_missing(result):
            name = match["path"]
            for path in (os.path.normpath(os.path.join(cwd, name)) for cwd in cwds):
                if match["folder"]:
                    self.folders[path] = None
                    continue
                text = self.read_file(path)
                if text is not None:
                    self.files[path] = text
                else:
                    self.folders[os.path.dirname(path)] = None
            if "/" in name and not match["folder"] and re.fullmatch(r"[\w./+@-]+", name):
                self.programs[name] = None
        return before != (len(self.files), len(self.folders), len(self.programs))

    def read_file(self, path: str) -> str | None:
        """Text of a file of the script's folder or checkout; None if it is not one that it may read."""
        relative = os.path.relpath(path, self.folder)
        for root in self.roots:
            file = Path(path) if relative.startswith("..") else root / relative
            try:
                real = file.resolve()
                is_inside = any(real.is_relative_to(each) for each in self.roots)
                is_hidden = any(part.startswith(".") for part in real.relative_to(self.roots[-1]).parts)
                if is_inside and not is_hidden and real.suffix in _READABLE and real.stat().st_size <= LARGEST_FILE:
                    return real.read_text(encoding="utf-8").replace("\r\n", "\n")
            except (OSError, ValueError):
                continue
        return None

    # Facts

    def list_shell_variables(self) -> list[str]:
        """Variables of this shell that the script names."""
        names = {"HOME", *(name for text in self.files.values() for name in re.findall(r"[A-Za-z_]\w*", text))}
        return [name for name in self.environ if name in names and not _BASH_OWN.fullmatch(name)]

    def list_cluster_variables(self) -> list[str]:
        names = dict.fromkeys(name for text in self.files.values() for name in _VARIABLE.findall(text))
        return [name for name in names if _CLUSTER.fullmatch(name) and name not in self.environ]

    def make_token_state(self) -> _State:
        variables = {name: f"primus_var_{name}_" for name in self.list_cluster_variables()}
        return _State(answer="token", variables=variables)

    def read_token(self, match: re.Match[str]) -> _Fact:
        if match["kind"] != "fact":
            return _Fact("variable" if match["kind"] == "var" else "argument", match["name"])
        try:
            beginning = bytes.fromhex(match["name"]).decode(errors="replace")
        except ValueError:
            return _Fact("command", match["name"])
        return _Fact("command", self.commands.get(beginning, beginning))

    def list_groups(self) -> list[_State]:
        """Runs in which many facts are different at once."""
        names = self.list_cluster_variables()
        small = {name: _make_value(name, "1") for name in names}
        large = {name: _make_value(name, str(64 + index)) for index, name in enumerate(names)}
        return [
            _State(variables=small),
            _State(variables=large, answer="large"),
            _State(variables=small, answer="lines", has_files=True),
            _State(answer="none"),
            _State(has_files=True),
        ]

    def add_doubts(self, probe: ScriptProbe, base: _Run, token: _Run, groups: list[_Run]) -> None:
        """Arguments that depend on facts of the cluster, and on which."""
        if base.arguments is None:
            return
        facts: dict[str, dict[_Fact, None]] = {}
        values: dict[str, list[tuple[str, ...] | None]] = {}
        for name in _list_differences(base, token) if token.arguments else []:
            value = " ".join((token.arguments or {}).get(name, ()))
            found = [self.read_token(match) for match in _TOKEN.finditer(value)]
            facts.setdefault(name, {}).update(dict.fromkeys(found))
        trials = list(self.list_trials(base, [token, *groups]))
        tried = self.run_all(state for _, state in trials[: 2 * MOST_FACTS])
        runs = [
            *zip((fact for fact, _ in trials), tried, strict=False),
            *((None, run) for run in groups if run is not token),
        ]
        is_open = any(name not in facts for _, run in runs for name in _list_differences(base, run))
        if is_open:
            changes = list(self.list_changes(base, groups))
            runs += zip((fact for fact, _ in changes), self.run_all(state for _, state in changes), strict=True)
        for fact, run in runs:
            for name in _list_differences(base, run):
                facts.setdefault(name, {}).update({fact: None} if fact else {})
                values.setdefault(name, []).append((run.arguments or {}).get(name))
        text = "\n".join(self.files.values())
        for name, causes in facts.items():
            seen = [base.arguments.get(name), *values.get(name, [])]
            is_kept = bool(causes) and all(_has_default(cause, base, text) for cause in causes)
            shown = [cause.describe() for cause in causes] or ["several facts of the cluster together"]
            probe.doubts.append(Doubt(name, list(dict.fromkeys(seen)), shown, is_kept))

    def list_trials(self, base: _Run, runs: list[_Run]) -> Iterator[tuple[_Fact, _State]]:
        """Each fact with each value that the script compares it with."""
        seen: set[tuple[_Fact, str]] = set()
        for run in runs:
            for token, value in _list_comparisons(run, self.files):
                fact = self.read_token(token)
                if fact.kind != "argument" and (fact, value) not in seen:
                    seen.add((fact, value))
                    yield fact, _change_fact(base.state, fact, value)

    def list_changes(self, base: _Run, groups: list[_Run]) -> Iterator[tuple[_Fact, _State]]:
        """Each fact with other values, one at a time."""
        variables = [_Fact("variable", name) for name in self.list_cluster_variables()]
        commands = [_Fact("command", name) for name in _list_commands(groups)]
        files = [_Fact("file", path) for path in dict.fromkeys(p for run in groups for p in _list_tests(run.result))]
        for fact in [*variables, *commands, *files][:MOST_FACTS]:
            others = {"variable": ("1", "64"), "command": ("large", "lines", "none"), "file": ("",)}[fact.kind]
            for value in others:
                made = _make_value(fact.name, value) if fact.kind == "variable" else value
                yield fact, _change_fact(base.state, fact, made)

    def add_inputs(self, probe: ScriptProbe, base: _Run) -> None:
        """What the script takes from its arguments and from variables, which are empty or come from this shell."""
        text = "\n".join(self.files.values())
        if not self.args and _ARGUMENT.search(self.files[self.path]):
            marks = tuple(f"primus_arg_{number}_" for number in range(1, 10))
            given = self.run(structs.replace(base.state, args=marks))
            for token, value in _list_comparisons(given, self.files):
                if token["kind"] == "arg" and value not in probe.candidates.setdefault(token["name"], []):
                    probe.candidates[token["name"]].append(value)
            names = [name for name in _list_differences(base, given) if not _is_appended(base, given, name)]
            if names and base.arguments and given.arguments:
                shown = ", ".join(f"--{name}" for name in names[:6])
                probe.notes.append(
                    Note("arguments of the script", f"none given; {shown} depend on them: config import FILE ARGUMENTS")
                )
        if base.arguments is None:
            return
        unset = [name for name in self.list_unset(text) if not _CLUSTER.fullmatch(name)]
        marked_variables = {name: f"primus_var_{name}_" for name in unset}
        marked = self.run(structs.replace(base.state, variables=base.state.variables | marked_variables))
        found: dict[str, list[str]] = {}
        for name in _list_differences(base, marked) if marked.arguments else []:
            for match in _TOKEN.finditer(" ".join((marked.arguments or {}).get(name, ()))):
                found.setdefault(match["name"], []).append(name)
        for variable, names in found.items():
            probe.notes.append(
                Note(f"${variable}", f"not set by the script or in this shell: empty at --{names[0]}, as in bash")
            )
        for variable in [name for name in self.list_shell_variables() if name not in _OWN]:
            kept = {name: value for name, value in self.environ.items() if name != variable}
            without = _Probe(self.files[self.path], Path(self.path), self.args, kept, self.choose)
            without.files, without.folders, without.programs = self.files, self.folders, self.programs
            if names := _list_differences(base, without.run(base.state)):
                listed = ", ".join(f"--{name}" for name in names[:6])
                probe.notes.append(Note(f"${variable}", f"{self.environ[variable]} in this shell; it changes {listed}"))

    def list_unset(self, text: str) -> Iterator[str]:
        """Variables that are used without a default and assigned nowhere."""
        names = dict.fromkeys(first or second for first, second in _PLAIN_VARIABLE.findall(text))
        for name in names:
            assigned = rf"\b{name}\+?=|\b(?:for|read|mapfile|readarray|getopts|select|printf)\b[^\n;]*\b{name}\b"
            if name not in self.environ and not re.search(assigned, text):
                yield name

    def list_missing(self, base: _Run) -> Iterator[Note]:
        """Files that the script reads or starts and that are not here."""
        sources = {os.path.basename(entry["source"]) for entry in _list_trace(base.result)}
        for entry in _list_trace(base.result):
            words = entry["text"].split()
            if len(words) > 1 and words[0] in ("source", ".") and os.path.basename(words[1].strip("'")) not in sources:
                name = words[1].strip("'")
                is_environment = _ENVIRONMENTS.fullmatch(os.path.basename(name))
                reason = "" if is_environment else "is read by the script and is not here: what it sets is not known"
                yield Note(f"{name} (line {entry['line']})", reason)
        for match in _list_missing(base.result):
            if match["line"] is None and os.path.basename(match["shell"]) == "bash":
                yield Note(match["path"], "is started by the script and is not here: what it does is not known")


def _find_roots(path: Path) -> list[Path]:
    """Folders in which a script may read others: its own, and that of its checkout last."""
    folder = path.absolute().parent.resolve()
    checkout = next((each for each in folder.parents if (each / ".git").exists()), None)
    return [folder, checkout] if checkout else [folder]


def _format(run: _Run) -> str:
    return " ".join(f"{name}={value}" for name, value in run.state.variables.items())


def _make_value(name: str, number: str) -> str:
    """A value for a variable of a job: a number, or a name."""
    return f"node{number}" if name.endswith(_NAMES) else number


def _list_trace(result: RunResult) -> Iterator[re.Match[str]]:
    """Commands of the script as bash executed them, without those of the recorder."""
    for line in result.trace.split("\n"):
        match = _TRACE.match(line) if len(line) <= LONGEST_LINE else None
        if match and not match["source"].startswith("/.primus/") and match["text"] != "set -x":
            yield match


def _get_condition(entry: re.Match[str]) -> str:
    """The text of a traced condition; empty for other commands."""
    text = entry["text"]
    return text if text.startswith(("[", "'['", "test ", "((")) and len(text) <= LONGEST_CONDITION else ""


def _list_missing(result: RunResult) -> Iterator[re.Match[str]]:
    """Messages of bash about paths that are not in the sandbox."""
    lines = (line for line in result.errors.splitlines() if len(line) <= LONGEST_CONDITION)
    return filter(None, map(_MISSING.match, lines))


def _list_tests(result: RunResult) -> list[str]:
    """Paths whose existence the script asks for."""
    found: dict[str, None] = {}
    for entry in _list_trace(result):
        for match in _FILE_TEST.finditer(_get_condition(entry)):
            path = os.path.normpath(os.path.join(entry["cwd"], match["path"].strip("'")))
            found[path + _INSIDE if match["kind"] == "d" else path] = None
    return list(found)[:32]


def _list_comparisons(run: _Run, files: Mapping[str, str]) -> Iterator[tuple[re.Match[str], str]]:
    """Facts that are compared with a text, in a run in which facts are tokens."""
    assigned: dict[str, str] = {}
    for entry in _list_trace(run.result):
        text = entry["text"]
        if match := re.match(r"(?:export '?|local |declare (?:-\w+ )?)?([A-Za-z_]\w*)=(.*)", text):
            assigned[match[1]] = match[2]
        if text.startswith("case "):
            subject = _resolve_subject(text[5:].removesuffix(" in"), assigned)
            patterns = _list_patterns(files.get(entry["source"], ""), int(entry["line"] or 0))
            yield from ((token, each) for token in _TOKEN.finditer(subject) for each in patterns)
        for match in _COMPARISON.finditer(_get_condition(entry)):
            sides = match["left"], match["right"]
            for side, other in (sides, sides[::-1]):
                value = re.sub(r"\\(.)", r"\1", other).strip("'\"^$*.")
                if value and not _TOKEN.search(other):
                    yield from ((token, value) for token in _TOKEN.finditer(side))


def _resolve_subject(text: str, assigned: Mapping[str, str]) -> str:
    """The word of a `case`, which bash does not trace expanded, with tokens in the place of facts."""
    text = re.sub(r"\$\(([^()]*)\)|`([^`]*)`", lambda m: _make_token((m[1] or m[2]).rpartition("|")[2].strip()), text)
    text = re.sub(r"\$\{?([A-Za-z_]\w*)[^}]*\}?", lambda m: assigned.get(m[1], f"primus_var_{m[1]}_"), text)
    return re.sub(r"\$\{?([1-9])[^}]*\}?", lambda m: f"primus_arg_{m[1]}_", text)


def _make_token(command: str) -> str:
    return f"primus_fact_{command[:TOKEN_LENGTH].encode().hex()}_"


def _list_patterns(text: str, line: int) -> list[str]:
    """Patterns of the `case` at a line of a script."""
    body = "\n".join(text.split("\n")[line - 1 :]).partition(" in")[2].partition("esac")[0]
    found = re.findall(r"(?:^|;;|\n)\s*\(?([^()\n;]+)\)", body)
    return [part.strip(" '\"*") for each in found for part in each.split("|") if part.strip(" '\"*")]


def _change_fact(state: _State, fact: _Fact, value: str) -> _State:
    if fact.kind == "variable":
        return structs.replace(state, variables=state.variables | {fact.name: value})
    if fact.kind == "command":
        return structs.replace(state, answers=state.answers | {fact.name: value})
    return structs.replace(state, present=(*state.present, fact.name))


def _list_commands(runs: list[_Run]) -> list[str]:
    """Commands from outside whose output or status may matter; not those that train."""
    found: dict[str, None] = {}
    for run in runs:
        for record in run.result.records:
            if not any(word.endswith(".py") for word in record.words):
                found[" ".join(record.words)] = None
    return [each for each in found if not _TOKEN.search(each)]


def _list_differences(base: _Run, other: _Run) -> list[str]:
    """Arguments that differ between two runs that both reached the command."""
    if base.arguments is None or other.arguments is None:
        return []
    names = dict.fromkeys([*base.arguments, *other.arguments])
    return [name for name in names if base.arguments.get(name) != other.arguments.get(name)]


def _is_appended(base: _Run, other: _Run, name: str) -> bool:
    """Whether only further words stand behind an argument: `$@` at the end of a command."""
    words = (other.arguments or {}).get(name)
    rest = tuple(word for word in words or () if not _TOKEN.search(word))
    return words is not None and rest == (base.arguments or {}).get(name)


def _has_default(fact: _Fact, base: _Run, text: str) -> bool:
    """Whether the script says itself what holds without the fact: it is not set, or not there."""
    if fact.kind == "file":
        return True
    if fact.kind != "variable" or fact.name in base.state.variables:
        return False
    return re.search(rf"\$\{{{fact.name}:?[-=]|-[zn] \"?\$\{{?{fact.name}\b", text) is not None


def _strip_shell(line: str) -> str:
    """A message of bash without the path of the script."""
    return re.sub(r"^\S*?: (?=line \d+: )", "", line)


def list_assigned_words(trace: list[str]) -> list[str]:
    """Words of the variables of a traced script that hold arguments of a command."""
    words: list[str] = []
    for text in trace:
        match = re.match(r"(?:(?:export|declare|local|readonly)(?: -\w+)? )?'?[A-Za-z_]\w*\+?=", text)
        try:
            parts = shlex.split(text[match.end() :].strip("()'")) if match else []
        except ValueError:
            continue
        found = [word for part in parts for word in part.split()]
        words += found if found and found[0].startswith("--") else []
    return words
