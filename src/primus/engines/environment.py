"""Make the environment of an engine: aside, verified by an import, then renamed to its place.

    FOLDER/NAME                 the environment; one with `primus-engine.json` was made here, others are the user's own
    FOLDER/.NAME.new-PID@HOST   one in the making; removed by the next start if its maker was killed
    FOLDER/.NAME.old-PID@HOST   a replaced one that is being removed
    FOLDER/.NAME.lock           held by the process that makes or replaces the environment
    FOLDER/NAME.log             output of the installer

The packages of the main environment are shared: pip sees them as installed and adds only what is missing, or what the
engine needs in another version, which then takes precedence.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from primus import interpreter
from primus.bootstrap import packages
from primus.engines import other_python
from primus.engines.choice import choose_engine
from primus.engines.installation import (
    FOLDER_VARIABLE,
    RECORD_FILE,
    EngineInstallation,
    EnvironmentRecord,
    find_environment,
    find_environment_folder,
    is_current,
    read_record,
)
from primus.engines.requirement import EnginePackages, EngineRequirement
from primus.errors import UnfitError
from primus.messages import Say
from primus.package_files import PROGRAM
from primus.site_folders import find_module_folder, list_import_folders, list_package_versions

OWN_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
SHARED_FILE = "primus-shared.pth"
LOCK_TIMEOUT_S = 1800.0
"""As in `primus-cli`: another start may be downloading on a slow line."""
IMPORT_TIMEOUT_S = 600.0
"""The first import compiles each module, on a network file system perhaps."""
FIXED = re.compile(r"(torch|torchvision|torchaudio|numpy|triton|pytorch[-_]triton.*)")
"""Shared packages that an engine must not replace: they are compiled for each other, and for the devices."""
DOWNLOADS = re.compile(r"\s*(Downloading \S+(?: \([^)]*\))?)")
VERIFY = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def prepare_engine(names: Sequence[str], environ: Mapping[str, str], say: Say) -> None:
    """Make the environment of a backend's engine if none of `names` is installed, as the first launch does.

    Raises:
        UnfitError: None is installed and none can be made, or the version is not supported.
    """
    choice = choose_engine(names, environ)
    if choice is not None and choice.installation is None:
        make_environment(choice.name, choice.requirement, environ, say)


def list_changes(name: str, engine: EngineRequirement, environ: Mapping[str, str]) -> list[str]:
    """What `make_environment` would do, for a dry run; touches nothing."""
    prefix = find_environment_folder(environ) / name
    if prefix.exists() and is_current(prefix, engine):
        return [f"{engine.title}: {prefix} is up to date"]
    if _needs_other_python(engine):
        return other_python.describe_change(name, engine, environ)
    wanted = _find_wanted(engine)
    requirements = _list_requirements(wanted, _list_shared_folders())
    return [
        f"{engine.title}: {'replaces' if prefix.exists() else 'makes'} the environment {prefix}",
        f"{engine.title}: installs {wanted.describe(requirements)} (about {wanted.download_mb} MB)",
    ]


def make_environment(name: str, engine: EngineRequirement, environ: Mapping[str, str], say: Say) -> EngineInstallation:
    """Make the environment of an engine, or update it; does nothing if it is up to date.

    Of several starts at the same time one makes it, the others wait.

    Raises:
        UnfitError: The engine cannot be installed here, or does not work; nothing half-made is left.
    """
    folder = find_environment_folder(environ)
    prefix = folder / name
    # Without the lock: an environment that is up to date may be in a folder that only others can write.
    if not (prefix.exists() and is_current(prefix, engine)):
        if _needs_other_python(engine):
            _refuse_foreign(prefix, engine)
            other_python.make_environment(name, engine, environ, say)
        else:
            _make_by_this_python(prefix, engine, environ, say)
    found = find_environment(name, engine, environ)
    if found is None:
        raise UnfitError(f"{prefix} has no {engine.title}", f"remove it, then: {PROGRAM} setup --engine {name}")
    return found


def _needs_other_python(engine: EngineRequirement) -> bool:
    return bool(engine.python) and engine.find_packages(OWN_VERSION) is None


def _make_by_this_python(prefix: Path, engine: EngineRequirement, environ: Mapping[str, str], say: Say) -> None:
    wanted = _find_wanted(engine)
    shared = _list_shared_folders()
    _check_needs(engine, shared)
    with _hold_lock(prefix.parent, prefix.name, environ, say):
        if not (prefix.exists() and is_current(prefix, engine)):  # the one that was waited for has made it
            _refuse_foreign(prefix, engine)
            record = EnvironmentRecord(engine=prefix.name, packages=wanted, shared=shared)
            _replace_environment(prefix, record, engine, say)


def _find_wanted(engine: EngineRequirement) -> EnginePackages:
    wanted = engine.find_packages(OWN_VERSION)
    if wanted is None:
        raise UnfitError(f"setup cannot install {engine.title}", engine.remedy)
    return wanted


def _list_shared_folders() -> tuple[str, ...]:
    """Site folders of this interpreter; the folders that their .pth files name follow from them."""
    return tuple(dict.fromkeys(entry for entry in sys.path if entry.endswith("-packages") and os.path.isdir(entry)))


def _check_needs(engine: EngineRequirement, shared: Sequence[str]) -> None:
    for module in engine.needs:
        if find_module_folder(module, shared) is None:
            raise UnfitError(
                f"{engine.title} needs {module}, which {sys.prefix} does not have",
                f"install PyTorch first: PRIMUS_TORCH=auto {PROGRAM} setup (see docs/install.md)",
            )


def _refuse_foreign(prefix: Path, engine: EngineRequirement) -> None:
    """An environment that primus has not made is not replaced, nor one whose interpreter is on other machines."""
    if prefix.exists() and not os.access(prefix / "bin" / "python", os.X_OK):
        raise UnfitError(
            f"the interpreter of {prefix} is not on this machine",
            f"remove {prefix} if no other machine uses it, or name another folder: {FOLDER_VARIABLE}=FOLDER",
        )
    if prefix.exists() and read_record(prefix) is None:
        raise UnfitError(
            f"{prefix} was not created by primus, and has no {engine.title}",
            f"install {engine.package} in it, remove it, or name another folder: {FOLDER_VARIABLE}=FOLDER",
        )


@contextlib.contextmanager
def _hold_lock(folder: Path, name: str, environ: Mapping[str, str], say: Say) -> Iterator[None]:
    """Hold the lock of an environment, which ends with this process however that dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f".{name}.lock").open("a")
    except OSError as error:
        raise UnfitError(
            f"{folder} cannot be written: {error.strerror}", f"name another folder: {FOLDER_VARIABLE}=~/primus-engines"
        ) from None
    limit_s = float(environ.get("PRIMUS_LOCK_TIMEOUT_S") or LOCK_TIMEOUT_S)
    with file:
        deadline, is_waiting = time.monotonic() + limit_s, False
        # flock(2) has no time limit, so it is polled: 0.2 s is short for an installation. The lock file is never
        # removed, since a start that waits for a removed file would hold a lock that no other start sees.
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UnfitError(
                        f"another process has been creating {folder / name} for {limit_s:g} s",
                        f"see {folder / name}.log; if it hangs, stop it",
                    ) from None
                if not is_waiting:
                    say(f"another process is creating {folder / name}: waiting for it")
                is_waiting = True
                time.sleep(0.2)
            except OSError as error:
                say(f"{folder} has no locks ({error.strerror}): let one command finish before you start others")
                break
        yield


def _replace_environment(prefix: Path, record: EnvironmentRecord, engine: EngineRequirement, say: Say) -> None:
    folder, name, maker = prefix.parent, prefix.name, f"{os.getpid()}@{socket.gethostname()}"
    for leftover in folder.glob(f".{name}.*-*@*"):
        if _is_abandoned(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
    building, old = folder / f".{name}.new-{maker}", folder / f".{name}.old-{maker}"
    log_path = folder / f"{name}.log"
    say(f"{'updating' if prefix.exists() else 'creating'} environment of {engine.title}, {prefix} (log: {log_path})")
    try:
        with log_path.open("w", encoding="utf-8") as log:
            _build_environment(building, record, engine, log, say)
        # The environment is missing between the two renames; a start that looks then waits for the lock.
        _move_scripts(building, prefix)
        if prefix.exists():
            prefix.rename(old)
        try:
            building.rename(prefix)
        except OSError:
            # Locks of some shared file systems end at the host: another one has made it in the meantime.
            if not is_current(prefix, engine):
                raise
    except OSError as error:
        reason = error.strerror or error
        raise UnfitError(f"{prefix} cannot be created: {reason}", f"the whole log: {log_path}") from None
    finally:
        for leftover in (building, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether the maker of an unfinished environment has died; on another host, whether its time is long over."""
    match = re.search(r"\.(?:new|old)-(\d+)@(.+)$", folder.name)
    if match is None:
        return False
    # The process of another host cannot be asked whether it lives; 12 hours are far beyond any installation.
    if match[2] != socket.gethostname():
        return time.time() - folder.stat().st_mtime > 24 * LOCK_TIMEOUT_S
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    # The own id is that of an earlier process: in containers, process ids often repeat.
    return int(match[1]) == os.getpid()


def _build_environment(
    building: Path, record: EnvironmentRecord, engine: EngineRequirement, log: TextIO, say: Say
) -> None:
    """Make the environment in `building`, and import the engine there."""
    run_logged([sys.executable, "-m", "venv", "--without-pip", "--prompt", record.engine, str(building)], log)
    site = next(building.glob("lib/python3*/site-packages"), None)
    if site is None:
        raise UnfitError(
            f"{sys.executable} cannot create environments: {read_complaint(log)}",
            "Debian, Ubuntu: apt install python3-venv",
        )
    lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in record.shared)
    (site / SHARED_FILE).write_text(lines, encoding="utf-8")
    began = time.monotonic()
    _install_packages(building, record, engine, log, say)
    _verify_imports(building, engine, log)
    # Last: the record says that the environment is complete, and that its engine can be imported.
    (building / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    added = len(list_package_versions([str(site)]))
    say(f"{engine.title}: {added} packages added in {time.monotonic() - began:.0f} s, import verified")


def _list_requirements(wanted: EnginePackages, shared: Sequence[str]) -> list[str]:
    missing = [each for module, each in wanted.if_missing.items() if find_module_folder(module, shared) is None]
    return [*wanted.packages, *missing]


def _install_packages(
    building: Path, record: EnvironmentRecord, engine: EngineRequirement, log: TextIO, say: Say
) -> None:
    wanted, config = record.packages, packages.read_pip_config()
    installed = list_package_versions(list_import_folders(building))
    present = {packages.normalize(name): version for name, version in installed.items()}
    requirements = _list_requirements(wanted, record.shared)
    constraints, overrides = building / "primus-constraints.txt", building / "primus-overrides.txt"
    # pip sees the shared packages, and would replace those of FIXED: it gets their versions as constraints.
    fixed = {name: version for name, version in present.items() if FIXED.fullmatch(name)}
    pinned = {packages.normalize(each.split("==")[0]): each for each in (*wanted.pins, *requirements)}
    lines = [each for name, each in pinned.items() if name not in fixed and each not in requirements]
    constraints.write_text("".join(f"{line}\n" for line in [*lines, *(f"{n}=={v}" for n, v in fixed.items())]))
    words = ["--constraint", str(constraints), *([] if wanted.with_requirements else ["--no-deps"]), *requirements]
    uv = packages.find_uv() or (None if "pip" in present else shutil.which("uv"))
    if uv:
        # uv sees no shared packages, and would install them again: they are removed from its resolution, except those
        # that the engine pins to another version.
        changed = {name for name, each in pinned.items() if each.split("==")[1] != present.get(name)}
        shared = [name for name in present if name not in changed]
        overrides.write_text("".join(f"{name} ; python_version < '0'\n" for name in shared))
        constraints.write_text("".join(f"{line}\n" for line in lines))
        words = ["--override", str(overrides), *words]
    command, environ = packages.build_install_command(str(building / "bin/python"), words, config, uv)
    environ.setdefault("PIP_RETRIES", "1")  # an unreachable index fails in seconds, not in minutes
    environ.setdefault("UV_HTTP_RETRIES", "1")
    size = f" (about {wanted.download_mb} MB)" if wanted.download_mb else ""
    say(f"installing {wanted.describe(requirements)} with {'uv' if uv else 'pip'}{size}")
    if run_logged(command, log, environ, say):
        raise UnfitError(
            f"{engine.title} cannot be installed: {read_complaint(log)}",
            f"the whole log: {log.name}; mirrors and machines without network: docs/engines.md",
        )


def _verify_imports(building: Path, engine: EngineRequirement, log: TextIO) -> None:
    """Import the engine by the interpreter of its environment.

    Raises:
        UnfitError: It cannot be imported; the message is its own error.
    """
    names = engine.imports or (engine.module,)
    command = [*interpreter.build_code_command(str(building / "bin/python"), VERIFY), *names]
    # PYTHONPATH may name another copy of the engine, which would be imported instead.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= engine.import_variables
    if run_logged(command, log, environ, limit_s=IMPORT_TIMEOUT_S):
        raise UnfitError(
            f"the installed {engine.title} cannot be imported: {read_complaint(log)}", f"the whole log: {log.name}"
        )


def run_logged(
    command: Sequence[str],
    log: TextIO,
    environ: Mapping[str, str] | None = None,
    say: Say | None = None,
    limit_s: float | None = None,
) -> int:
    """Run a command with its output in the log; its downloads are printed as they begin. Gives the exit code."""
    # Without credentials, because users attach this log to bug reports.
    log.write(f"$ {packages.mask(' '.join(command))}\n")
    log.flush()
    pipe = subprocess.PIPE if say else log
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        env=environ,
        text=True,
        errors="replace",
    )
    with process:
        try:
            for line in process.stdout or ():
                line = packages.mask(line)
                log.write(line)
                match = DOWNLOADS.match(line)
                if match and say:
                    say(match[1])
            # Reaches here after the output has ended: a limit works only for a command whose output is not read here.
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            log.write(f"Error: no response in {limit_s:g} s\n")
            code = 1
        finally:
            # Also after Ctrl-C: an installer must not write into a folder that is being removed.
            if process.poll() is None:
                process.kill()
        log.flush()
    return code


def read_complaint(log: TextIO) -> str:
    """What the last command in the log says went wrong, in one line.

    pip gives the reason first, and general advice at the end; uv adds a cause; Python ends with its error.
    """
    text = Path(log.name).read_text(encoding="utf-8", errors="replace").rpartition("\n$ ")[2]
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    cause = [match[1] for line in lines if (match := re.match("(?:cause|Caused by): (.*)", line))]
    installer = [match[1] for line in lines if (match := re.match("(?:ERROR|error|Error): (.*)", line))]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (cause or installer or raised[-1:] or lines[-1:] or ["no output"])[0][:300]


def _move_scripts(building: Path, prefix: Path) -> None:
    """Let the scripts of the environment name their interpreter by its later path."""
    old, new = os.fsencode(building), os.fsencode(prefix)
    for script in (building / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        if old in content:
            script.write_bytes(content.replace(old, new))
