"""Containers of pyxis, the plug-in of Slurm for enroot: options of srun start them, on all nodes of a step.

Sources: README of github.com/NVIDIA/pyxis (0.24), documentation of github.com/NVIDIA/enroot (4.1).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from primus.errors import UsageError
from primus.plan import BindMount
from primus.runtimes.container.engines import SQUASHFS, ContainerSpec
from primus.runtimes.container.options import ContainerArguments, Options, group_engine_options

PREFIXES = ("--container-", "--no-container-")
"""Prefixes of the options that pyxis adds to srun."""
URIS = ("docker://", "dockerd://", "podman://", "containerd://")
"""Schemes of enroot import; an image without a scheme is one of a registry."""


def list_step_options(container: ContainerSpec, options: ContainerArguments, names: Iterable[str]) -> tuple[str, ...]:
    """Options of srun that start the tasks of a step in `container`.

    The container has the network, /dev and /dev/shm of the node, and the limits of slurmd. It gets all variables of
    the step, of which the image's own win unless they are named here.

    Args:
        container: The container.
        options: Options of the runtime.
        names: Variables of the run.

    Raises:
        UsageError: pyxis does not support an option, or cannot mount a path.
    """
    _check_options(options)
    typed = group_engine_options(options.passed)
    given = {name.replace("--no-", "--") for name in typed}
    # Slurm's own variables are different in each task, and no image sets them.
    passed = [name for name in names if not name.startswith("SLURM_")]
    # Of a list that is given twice, Slurm passes only the last one on to the nodes (observed with 22.05).
    lists = {
        "--container-mounts": [*map(_format_mount, container.mounts), *typed.get("--container-mounts", ())],
        "--container-env": [*passed, *typed.get("--container-env", ())],
    }
    words = [f"--container-image={format_enroot_image(container.image)}"]
    words += [f"{name}={','.join(values)}" for name, values in lists.items() if values]
    defaults = {
        "--container-workdir": f"--container-workdir={container.workdir}",
        # As with the other engines: the image's own home folder, a writable layer, and no command of the image.
        "--container-mount-home": "--no-container-mount-home",
        "--container-writable": "--container-writable",
        "--container-entrypoint": "--no-container-entrypoint",
    }
    if "--container-readonly" in given:
        del defaults["--container-writable"]
    if container.user is not None:
        defaults["--container-remap-root"] = "--no-container-remap-root"
    if options.name:
        defaults["--container-name"] = f"--container-name={options.name}"
    words += [word for name, word in defaults.items() if name not in given]
    others = [(name, value) for name, values in typed.items() if name not in lists for value in values[-1:]]
    return (*words, *(f"{name}={value}" if value else name for name, value in others))


def format_enroot_image(image: str) -> str:
    """`image` as enroot has it: REGISTRY#NAME, or an absolute path of an image file."""
    if image.startswith(("/", "./", "../")) or image.endswith(SQUASHFS):
        return os.path.abspath(image)
    registry, slash, rest = image.partition("/")
    # As docker tells a registry from the first part of a name (distribution/reference, splitDockerDomain).
    is_registry = slash and ("." in registry or ":" in registry or registry == "localhost")
    return f"{registry}#{rest}" if is_registry and "#" not in image and not image.startswith(URIS) else image


def _format_mount(mount: BindMount) -> str:
    if set(",:") & set(mount.source + mount.target):
        raise UsageError(
            f"pyxis cannot mount {mount.source}: its path contains a comma or a colon", "use another path or --engine"
        )
    return f"{mount.source}:{mount.target}" + ":ro" * mount.is_read_only


def _check_options(options: ContainerArguments) -> None:
    unused = {
        "--shell": (options.shell, "slurm srun --pty, with --container-image=IMAGE, starts bash there"),
        "--clean": (options.clean, "pyxis removes its containers when the step ends"),
        "--grace": (options.grace != Options().grace, "Slurm ends the step: scontrol show config | grep KillWait"),
        "--no-devices": (not options.devices, "to hide NVIDIA GPUs: --env NVIDIA_VISIBLE_DEVICES=void"),
    }
    for name, (is_given, hint) in unused.items():
        if is_given:
            raise UsageError(f"--engine pyxis does not support {name}", hint)
    for name in group_engine_options(options.passed):
        if not name.startswith(PREFIXES):
            raise UsageError(
                f"--engine pyxis does not support {name}",
                "its options begin with --container- or --no-container-; options of srun stand behind 'slurm srun'",
            )
