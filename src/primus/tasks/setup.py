"""Install what training needs, or training engines, each in its own environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import requires

from msgspec import Struct

from primus import package_files
from primus.engines.environment import list_changes, make_environment
from primus.engines.extra_packages import install_extra_packages, parse_requirements
from primus.engines.requirement import EngineRequirement, list_engines, read_engine
from primus.errors import PrimusError, UnfitError, UsageError
from primus.task import TaskContext

ALL = "all"


class Options(Struct, frozen=True, kw_only=True):
    """Options of `setup`."""

    engine: tuple[str, ...] = ()
    """Engine such as torchtitan, several separated by commas, or all; may be repeated."""
    with_: tuple[str, ...] = ()
    """Packages to install as well, such as the tracker wandb, separated by commas: into the environments of the named
    engines, else into that of primus."""


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What would be made and installed."""
    extra = parse_requirements(options.with_)
    if _is_own_setup(options):
        return [f"installs PyTorch for this machine, and what training needs, into {sys.prefix}"]
    lines = [
        line for name, engine in _list_chosen(options).items() for line in list_changes(name, engine, context.environ)
    ]
    return [*lines, *([f"installs {', '.join(extra)}"] if extra else [])]


def run(options: Options, context: TaskContext) -> None:
    """Make the environment of each engine, and print where it is; a failing one does not prevent the others.

    Without an engine or package, an installed primus gets what training needs; ./primus-cli does so in a checkout.

    Raises:
        PrimusError: An engine could not be installed; the message says why.
    """
    if _is_own_setup(options):
        _set_up_own_environment()
        context.result({"environment": sys.prefix}, sys.prefix)
        return
    failures: list[PrimusError] = []
    made = {}
    extra = parse_requirements(options.with_)
    if extra and not options.engine:
        install_extra_packages(sys.executable, extra, _say)
    for name, engine in _list_chosen(options).items():
        try:
            made[name] = make_environment(name, engine, context.environ, _say)
            if extra:
                install_extra_packages(made[name].python, extra, _say)
        except PrimusError as error:
            failures.append(error)
    if made or not failures:
        lines = [f"{engine.python}  # {name} {engine.version}" for name, engine in made.items()]
        context.result(made, "\n".join(lines))
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise UnfitError("\n".join(map(str, failures)))


def _is_own_setup(options: Options) -> bool:
    return package_files.CHECKOUT is None and not options.engine and not options.with_


def _set_up_own_environment() -> None:
    """Install PyTorch for this machine and the packages of training into the environment of primus.

    Raises:
        PrimusError: They cannot be installed; the log says why.
    """
    from primus.bootstrap import install  # for this alone

    log = os.path.join(sys.prefix, "primus-setup.log")
    least = next(each for each in requires("primus") or () if each.startswith("torch>=")).split(";")[0]
    options = ["--extras", "native,data", "--log", log, "--least", least.removeprefix("torch>=").strip()]
    code = install.main(options)
    if code == install.FAILED:
        raise PrimusError(f"the packages could not be installed into {sys.prefix}", f"the log says why: {log}")
    if code:
        raise UnfitError("PyTorch was not installed", f"the log has more: {log}")


def _say(text: str) -> None:
    print(f"primus-cli: {text}", file=sys.stderr, flush=True)


def _list_chosen(options: Options) -> dict[str, EngineRequirement]:
    """The named engines; `all` are those that setup can install on this Python.

    Raises:
        UsageError: None is named, nor a package, or an engine is unknown.
    """
    names = [name for word in options.engine for name in word.split(",") if name]
    if not names and not options.with_:
        raise UsageError("setup needs an engine", f"--engine {ALL}, or one of: {', '.join(_list_installable())}")
    wanted = [each for name in names for each in (_list_installable() if name == ALL else [name])]
    return {name.lower().replace("_", "-"): read_engine(name) for name in wanted}


def _list_installable() -> Iterator[str]:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (name for name, engine in list_engines().items() if engine.find_packages(version))
