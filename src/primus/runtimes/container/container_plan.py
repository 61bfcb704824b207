"""Plan a container without starting, writing or querying anything."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from primus.errors import UsageError
from primus.launch import inherited_variables, variables
from primus.launch.command import NODE_END
from primus.launch.run_remote import node_rank
from primus.machine.facts import MachineFacts
from primus.plan import BindMount, LaunchPlan, PlanContext, Variable
from primus.redaction import is_secret_name, redact_args
from primus.runtimes.container import engines, mounts, pyxis
from primus.runtimes.container.devices import read_container_host
from primus.runtimes.container.engines import ContainerEngine, ContainerSpec
from primus.runtimes.container.options import ContainerArguments, group_engine_options
from primus.runtimes.container.variables import changes_client

AMD_IMAGE = "rocm/primus:v26.5"
"""AMD-AGI/Primus `runner/.primus.yaml`."""
SHELL = ("sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")
SHELL_GRACE_S = 5.0
"""An interactive shell ignores SIGTERM, so waiting longer is of no use."""
TASK_NOTE = "the task would be: "
PRINTED_NOTES = (TASK_NOTE, "warning: ")
"""Prefixes of notes that are printed at a start as well, not only in a dry run."""
HOME = "/tmp"  # noqa: S108  writable for every user of every image
ROOT = Path("/")


def limit_shell_grace(options: ContainerArguments) -> ContainerArguments:
    """`options`, with the grace period of a shell limited."""
    return structs.replace(options, grace=min(options.grace, SHELL_GRACE_S)) if options.shell else options


def plan_container(
    plan: LaunchPlan, options: ContainerArguments, context: PlanContext, root: Path = ROOT
) -> tuple[LaunchPlan, ContainerSpec]:
    """`plan` in a container, and that container.

    Args:
        plan: What runs inside; its argv is empty for a shell without a task.
        options: Options of the runtime.
        context: Facts that a plan may use.
        root: Root of the file system, another folder in tests.

    Raises:
        UsageError: An option is invalid, or no image is given.
    """
    options = limit_shell_grace(options)
    container, notes = build_container(options, context, root)
    typed, unread = _resolve_typed_variables(options, context, plan.env)
    everything = plan.env | typed | variables.name_typed_variables(typed)
    by_name = {name: each for name, each in everything.items() if not changes_client(name)}
    inner = structs.replace(plan, argv=_build_inner_command(plan.argv, typed, everything), env=by_name)
    is_apptainer = container.engine.kind == "apptainer"
    of_shell = () if is_apptainer else inherited_variables.list_inherited_names(context.environ)
    own = {"PYTHONNOUSERSITE": Variable("1", "container")} if is_apptainer else {}
    names = sorted({*of_shell, *by_name})
    if is_apptainer:
        notes.append(f"apptainer passes on all variables except {' '.join(inherited_variables.HIDDEN)}")
    visible = [name for name in names if name.endswith("VISIBLE_DEVICES")]
    if visible and engines.chooses_gpus(group_engine_options(options.passed)):
        notes.append(f"warning: {visible[0]} selects among the GPUs that your options select, renumbered from 0")
    notes += [f"each node reads the variables of {file}" for file in unread]
    if options.shell and plan.argv:
        notes.append(f"{TASK_NOTE}{shlex.join(redact_args(inner.argv))}")
    if container.engine.kind == "pyxis":
        return structs.replace(
            inner,
            step_options=pyxis.list_step_options(container, options, names),
            inherited=tuple(name for name in of_shell if name not in by_name),
            mounts=container.mounts,
            notes=(*plan.notes, *notes),
        ), container
    literal = _list_home_variables(container, context.environ)
    if options.shell:
        literal |= {name: each.value for name, each in everything.items() if name not in by_name}
    argv = SHELL if options.shell else inner.argv
    outer = LaunchPlan(
        argv=engines.build_engine_command(container, options, names, literal, argv),
        env=own | by_name,
        inherited=tuple(name for name in of_shell if name not in by_name),
        mounts=container.mounts,
        notes=(*plan.notes, *notes),
        inner=None if options.shell else inner,
    )
    return outer, container


def build_container(
    options: ContainerArguments, context: PlanContext, root: Path = ROOT
) -> tuple[ContainerSpec, list[str]]:
    """The container, and notes about it."""
    environ, is_here = context.environ, context.is_here
    asked = options.image or environ.get("DOCKER_IMAGE") or ""
    engine = engines.choose_engine(options, asked, environ, is_here)
    facts = context.facts(None) if is_here and (options.devices or not asked) else MachineFacts()
    node = read_container_host(facts, engine.kind, with_devices=options.devices, root=root) if is_here else None
    cwd = os.getcwd()
    ours = mounts.list_own_mounts(cwd, context.directory, environ, has_run=context.starts_workers, is_here=is_here)
    folders = mounts.merge_mounts(ours, mounts.parse_mounts(options.mount, cwd))
    rank = node_rank(environ)
    run_id = os.path.basename(context.directory)
    container = ContainerSpec(
        engine=engine,
        image=asked or _choose_default_image(facts, is_here),
        name=engines.check_container_name(options.name, engine) or f"primus-{run_id}-{context.attempt}-{rank}",
        labels={"primus.run": run_id, "primus.user": str(os.getuid()), "primus.node": str(rank)},
        rank=rank,
        mounts=folders,
        workdir=cwd,
        node=node,
        user=(os.getuid(), os.getgid()) if options.user else None,
        has_terminal=options.shell and is_here and sys.stdin.isatty(),
    )
    return container, _list_container_notes(container, folders, is_here, bool(asked))


def build_client_environ(
    engine: ContainerEngine, environ: Mapping[str, str], env: Mapping[str, Variable]
) -> dict[str, str]:
    """Variables of the engine's client: this shell's, and those that are passed by name."""
    hidden = inherited_variables.HIDDEN if engine.kind == "apptainer" else ()
    kept = {name: value for name, value in environ.items() if name not in hidden}
    return kept | {name: variable.value for name, variable in env.items()}


def _list_container_notes(
    container: ContainerSpec, folders: tuple[BindMount, ...], is_here: bool, has_image: bool
) -> list[str]:
    notes = [f"engine: {container.engine.program}, {container.engine.source}"]
    if is_here:
        notes += [f"mount source {source} does not exist" for source in mounts.find_missing_sources(folders)]
    elif container.engine.kind != "pyxis":  # whose containers have the node's devices, and the limits of slurmd
        notes.append("devices, groups and limits are determined on each node")
    if not has_image:
        notes.append(f"image: {container.image}, the default for AMD GPUs; other nodes need --image")
    return notes


def _choose_default_image(facts: MachineFacts, is_here: bool) -> str:
    if not is_here or any(device.vendor == "amd" for device in facts.devices):
        return AMD_IMAGE
    raise UsageError(
        "no image is given; there is a default for AMD GPUs only",
        "set --image or $DOCKER_IMAGE, for example to an NGC PyTorch image for NVIDIA GPUs",
    )


def _resolve_typed_variables(
    options: ContainerArguments, context: PlanContext, given: Mapping[str, Variable]
) -> tuple[dict[str, Variable], list[str]]:
    """Variables of `--env` (secrets among them are in `given`), and the files that only the nodes can read."""
    environ = {**context.environ, **{name: variable.value for name, variable in given.items()}}
    known = [word for word in options.env if context.is_here or "=" in word or word in environ]
    found = variables.parse_variables(known, "--env", environ)
    return found | {name: given[name] for name in found if name in given}, [w for w in options.env if w not in known]


def _build_inner_command(
    argv: tuple[str, ...], typed: Mapping[str, Variable], everything: Mapping[str, Variable]
) -> tuple[str, ...]:
    """The command inside, with the typed variables as `direct --env`, which takes precedence over the experiment's.

    Variables that affect the engine's client are passed there by value.

    Raises:
        UsageError: One of the latter is a secret.
    """
    words: list[str] = []
    for name, variable in everything.items():
        if changes_client(name):
            if is_secret_name(name) or variable.is_secret:
                raise UsageError(
                    f"--env {name}: this secret cannot be passed by name, because the engine's client reads it as well",
                    "log in with the engine (docker login), or use another name",
                )
            words += ["--env", f"{name}={variable.value}"]
        elif name in typed:
            words += ["--env", name]
    if NODE_END not in argv:
        return argv
    place = argv.index(NODE_END) + 1
    return (*argv[:place], *words, *argv[place:])


def _list_home_variables(container: ContainerSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of a user without an entry in the image's /etc/passwd: PyTorch's caches need a home and a name."""
    if container.user is None:
        return {}
    name = environ.get("USER") or environ.get("LOGNAME") or str(container.user[0])
    return {"HOME": HOME, "USER": name, "LOGNAME": name}
