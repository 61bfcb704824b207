"""Choose the container engine, and build its command line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from primus.errors import UsageError, did_you_mean
from primus.plan import BindMount
from primus.runtimes.container.devices import ContainerHost
from primus.runtimes.container.options import ContainerArguments, group_engine_options

Kind = Literal["docker", "podman", "apptainer", "pyxis"]
KINDS: dict[str, Kind] = {"docker": "docker", "podman": "podman", "apptainer": "apptainer", "singularity": "apptainer"}
"""Kind by program, in search order."""
PYXIS = "pyxis"
"""Plug-in of Slurm (github.com/NVIDIA/pyxis): srun starts the container, so that there is no program to search for."""
SQUASHFS = (".sqsh", ".squashfs", ".sqfs")
"""Suffixes of image files of enroot."""

ULIMITS = {"memlock": -1, "nofile": 1048576, "stack": 67108864}
"""Limits inside the container; -1 is unlimited. RDMA locks the memory that it sends. Sources: documentation of NVIDIA's
framework containers (memlock, stack), AMD-AGI/Primus `runner/.primus.yaml` (nofile)."""

SECURITY = ("seccomp=unconfined", "label=disable")
"""NUMA memory policies need system calls that the default seccomp profile blocks (ROCm documentation, "Running ROCm
Docker containers"); SELinux labels make mounts unreadable."""

CAPABILITY = "SYS_PTRACE"
"""py-spy and gdb need it to read the stacks of ranks that hang."""


class ContainerEngine(Struct, frozen=True, kw_only=True):
    """The chosen engine."""

    kind: Kind
    program: str
    """Name, or the path that was given."""
    source: str
    """Origin of the choice, such as `--engine`."""
    is_found: bool = True
    """False if no engine is on this node's PATH."""

    @property
    def is_daemon(self) -> bool:
        """Whether containers outlive the process that starts them, and have names."""
        return self.kind != "apptainer"


def choose_engine(
    options: ContainerArguments, image: str, environ: Mapping[str, str], is_here: bool
) -> ContainerEngine:
    """Choose the engine by --engine, $PRIMUS_CONTAINER_ENGINE, the kind of image, or PATH.

    Raises:
        UsageError: The engine is unsupported, or cannot run such an image.
    """
    asked = [(options.engine, "--engine"), (environ.get("PRIMUS_CONTAINER_ENGINE"), "PRIMUS_CONTAINER_ENGINE")]
    for program, source in asked:
        if program:
            return _check_engine(program, source, image, is_here)
    if image.endswith(SQUASHFS):
        return _check_engine(PYXIS, f"image {image}", image, is_here)
    if image.endswith(".sif"):
        found = [name for name in ("apptainer", "singularity") if is_here and _find_program(name, environ)]
        return ContainerEngine(kind="apptainer", program=found[0] if found else "apptainer", source=f"image {image}")
    if not is_here:
        # This machine may be a login node without an engine; each node chooses again.
        return ContainerEngine(kind="docker", program="docker", source="the first on PATH of each node")
    for name, kind in KINDS.items():
        if _find_program(name, environ):
            return ContainerEngine(kind=kind, program=name, source="the first on PATH")
    return ContainerEngine(kind="docker", program="docker", source="no engine is on PATH", is_found=False)


def _check_engine(program: str, source: str, image: str, is_here: bool) -> ContainerEngine:
    name = Path(program).name
    if name == PYXIS and is_here:
        raise UsageError(
            f"{source}: pyxis is a plug-in of Slurm, and starts containers on the nodes of a job only",
            f"slurm srun ... -- container --engine {PYXIS} --image IMAGE -- <task>; elsewhere use another --engine",
        )
    if name not in (*KINDS, PYXIS):
        raise UsageError(f"{source} {program}: unsupported container engine", did_you_mean(name, (*KINDS, PYXIS)))
    if image.endswith(SQUASHFS) and name != PYXIS:
        raise UsageError(f"{name} cannot run {image}, an image of enroot", "use --engine pyxis, or another image")
    kind = KINDS.get(name, "pyxis")
    if image.endswith(".sif") and kind != "apptainer":
        raise UsageError(f"{name} cannot run {image}, an apptainer image", "remove --engine, or use another image")
    return ContainerEngine(kind=kind, program=program, source=source)


def _find_program(program: str, environ: Mapping[str, str]) -> str | None:
    import shutil  # not where the nodes choose the engine

    return shutil.which(program, path=environ.get("PATH"))


def check_container_name(name: str | None, engine: ContainerEngine) -> str:
    """The name that was given, or an empty text.

    Raises:
        UsageError: The engine does not support names, or this one.
    """
    if name and not engine.is_daemon:
        raise UsageError(f"--name {name}: {engine.program} does not name containers", "remove --name")
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]+", name, re.ASCII):
        raise UsageError(
            f"--name {name!r} is not a container name",
            "use two or more letters, digits and _.-, with a letter or digit first",
        )
    return name or ""


class ContainerSpec(Struct, frozen=True, kw_only=True):
    """A container before it is started."""

    engine: ContainerEngine
    image: str
    name: str
    labels: dict[str, str]
    rank: int
    """Rank of the node."""
    mounts: tuple[BindMount, ...]
    workdir: str
    node: ContainerHost | None
    """Devices of the node; None if the container runs on another node."""
    user: tuple[int, int] | None = None
    """UID and GID inside; None for the image's user."""
    has_terminal: bool = False


def build_engine_command(
    container: ContainerSpec,
    options: ContainerArguments,
    names: Iterable[str],
    literal: Mapping[str, str],
    argv: Sequence[str],
) -> tuple[str, ...]:
    """The command line that runs `argv` in `container`.

    Args:
        names: Variables that are passed by name.
        literal: Variables that are passed by value: they are not secret, and would affect the engine's client.
    """
    if container.engine.kind == "apptainer":
        return _build_apptainer_command(container, options, literal, argv)
    engine, given = container.engine, group_engine_options(options.passed)
    # Each default is omitted if the user has set the option. --init reaps processes and forwards signals to the
    # launcher.
    words = ["--rm"] * ("--rm" not in given) + ["--init"] * ("--init" not in given)
    # As apptainer and pyxis do: a program of the image that takes the command for its arguments may end without it.
    words += [] if "--entrypoint" in given else ["--entrypoint", ""]
    words += ["--name", container.name]
    words += [word for name, value in container.labels.items() for word in ("--label", f"{name}={value}")]
    # The network of the host: RDMA devices and the rendezvous port are used without a translation.
    words += [] if "--network" in given else ["--network", "host"]
    # Data loaders and NCCL exchange data in /dev/shm, which is 64 MiB by default (docker run, --shm-size).
    words += [] if {"--ipc", "--shm-size"} & given.keys() else ["--ipc", "host"]
    # For `docker stop` by others, which waits 10 s by default: too short for a checkpoint.
    words += [] if "--stop-timeout" in given else ["--stop-timeout", f"{options.grace:.0f}"]
    words += ["--cap-add", CAPABILITY]
    words += _repeat_option("--security-opt", SECURITY, given)
    words += _repeat_option("--ulimit", _list_ulimit_options(container.node), given)
    words += _list_device_options(engine, container.node, given) if container.node else []
    words += _list_user_options(container, given)
    words += [word for mount in container.mounts for word in ("--mount", _format_bind_option(mount, "readonly"))]
    words += [] if "--workdir" in given else ["--workdir", container.workdir]
    words += [word for name in names for word in ("--env", name)]
    words += [word for name, value in literal.items() for word in ("--env", f"{name}={value}")]
    words += (["-i"] + ["-t"] * container.has_terminal) if options.shell else []
    # The user's own options come last, since the engines use the last of repeated options.
    return (engine.program, "run", *words, *options.passed, container.image, *argv)


def _build_apptainer_command(
    container: ContainerSpec, options: ContainerArguments, literal: Mapping[str, str], argv: Sequence[str]
) -> tuple[str, ...]:
    """apptainer inherits environment, devices and limits; `--no-eval` keeps it from evaluating values as shell code."""
    given, node = group_engine_options(options.passed), container.node
    words = ["--no-eval"] + ([] if "--workdir" in given else ["--pwd", container.workdir])
    if node and "nvidia" in node.vendors and "--nv" not in given:
        words.append("--nv")
    contained = {"--contain", "-c", "--containall", "-C"} & given.keys()
    if node and "amd" in node.vendors and contained:
        words += ["--bind", "/dev/kfd,/dev/dri"]
    for mount in container.mounts:
        if set(",:") & set(mount.source + mount.target):
            words += ["--mount", _format_bind_option(mount, "ro")]
        else:
            words += ["--bind", f"{mount.source}:{mount.target}" + ":ro" * mount.is_read_only]
    if container.user is None:  # the user is the caller in any case
        words += [word for name, value in literal.items() for word in ("--env", _format_csv_line([f"{name}={value}"]))]
    return (container.engine.program, "exec", *words, *options.passed, format_image_uri(container.image), *argv)


def format_image_uri(image: str) -> str:
    """`image` as apptainer has it: files and folders as they are, others from a registry."""
    is_place = "://" in image or image.endswith(".sif") or image.startswith(("/", "./", "../"))
    return image if is_place else f"docker://{image}"


def _format_bind_option(mount: BindMount, read_only: str) -> str:
    """The value of `--mount`, which is a line of CSV: so paths may hold colons, commas and quotes."""
    fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
    return _format_csv_line(fields + [read_only] * mount.is_read_only)


def _format_csv_line(fields: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _repeat_option(option: str, ours: Iterable[str], given: Mapping[str, Sequence[str]]) -> list[str]:
    """Default values of a repeatable option, except those that the user has overridden."""
    theirs = {value.partition("=")[0].partition(":")[0] for value in given.get(option, ())}
    kept = [value for value in ours if value.partition("=")[0] not in theirs and "host" not in theirs]
    return [word for value in kept for word in (option, value)]


def _list_ulimit_options(node: ContainerHost | None) -> list[str]:
    """Limits, at most the hard limits if the engine cannot raise them."""
    highest = node.limits if node else {}
    values = {name: _limit_ulimit(wanted, highest.get(name, -1)) for name, wanted in ULIMITS.items()}
    return [f"{name}={value}:{value}" for name, value in values.items()]


def _limit_ulimit(wanted: int, highest: int) -> int:
    return highest if wanted == -1 else wanted if highest == -1 else min(wanted, highest)


def _list_device_options(engine: ContainerEngine, node: ContainerHost, given: Mapping[str, Sequence[str]]) -> list[str]:
    """Devices and groups of the node, except those that the user has chosen."""
    theirs = given.get("--device", ())
    is_chosen = chooses_gpus(given)
    paths: list[str] = []
    words: list[str] = []
    if "amd" in node.vendors and not is_chosen:
        paths += ["/dev/kfd", "/dev/dri"]
    if "nvidia" in node.vendors and not is_chosen and not any(value.startswith("/dev/nvidia") for value in theirs):
        words += ["--gpus", "all"] if engine.kind == "docker" else ["--device", "nvidia.com/gpu=all"]
    if node.has_infiniband:
        paths.append("/dev/infiniband")
    kept = [path for path in paths if not any(_is_below(value, path) for value in theirs)]
    words += [word for path in kept for word in ("--device", path)]
    if "amd" not in node.vendors:
        return words
    if engine.kind == "podman" and node.is_rootless:
        return words + ([] if "--group-add" in given else ["--group-add", "keep-groups"])
    groups = [] if "keep-groups" in given.get("--group-add", ()) else node.groups
    return words + [word for group in groups for word in ("--group-add", str(group))]


def chooses_gpus(given: Mapping[str, Sequence[str]]) -> bool:
    """Whether the user has chosen GPUs with an option of the engine."""
    return bool({"--gpus", "--runtime"} & given.keys()) or any("/gpu=" in value for value in given.get("--device", ()))


def _is_below(device: str, path: str) -> bool:
    source = device.partition(":")[0]
    return source == path or source.startswith(f"{path}/")


def _list_user_options(container: ContainerSpec, given: Mapping[str, Sequence[str]]) -> list[str]:
    if container.user is None:
        return []
    rootless = container.engine.kind == "podman" and container.node is not None and container.node.is_rootless
    if rootless:
        return [] if "--userns" in given else ["--userns", "keep-id"]
    return ["--user", f"{container.user[0]}:{container.user[1]}"]
