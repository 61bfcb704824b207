"""The files of an archive that are made for people: README.md, requirements.lock and Dockerfile."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from msgspec import Struct

from primus.bootstrap.install import PYTORCH_INDEX
from primus.bootstrap.packages import find_uv
from primus.errors import PrimusError, UnfitError
from primus.images.template import read_template
from primus.run_archive.manifest import CHECKOUT
from primus.runs.files import read_json
from primus.runs.snapshot import SystemInfo
from primus.runs.source_record import read_source_record
from primus.runs.store import Run
from primus.runs.summary import summarize_run

README, LOCK, DOCKERFILE = "README.md", "requirements.lock", "Dockerfile"
HASH_LIMIT_S = 120.0
PLACE = "/opt/run-archive"
"""Where an image has the archive."""


class RunEnvironment(Struct, frozen=True, kw_only=True):
    """What the guide files say about the environment of a run."""

    packages: dict[str, str]
    """Version by name."""
    system: SystemInfo
    image: str
    """Image of its container, by digest where it is known; empty without one."""
    has_checkout: bool
    """Whether the archive holds the sources of primus."""


def read_environment(run: Run, *, has_checkout: bool) -> RunEnvironment:
    """The environment of a run.

    Raises:
        PrimusError: A record is damaged.
    """
    lines = (run.directory / "env" / "packages.txt").read_text(encoding="utf-8").splitlines()
    container = run.directory / "container.json"
    image = read_json(container, dict) if container.is_file() else {}
    return RunEnvironment(
        packages=dict(line.split("==", 1) for line in lines if "==" in line),
        system=read_json(run.directory / "env" / "system_info.json", SystemInfo),
        image=str(image.get("digest") or image.get("image") or ""),
        has_checkout=has_checkout,
    )


def format_pins(environment: RunEnvironment) -> str:
    """A line for each package; without primus where the archive has its sources."""
    return "".join(
        f"{name}=={version}\n"
        for name, version in environment.packages.items()
        if not (name == "primus" and environment.has_checkout)
    )


def format_lock(environment: RunEnvironment, hashed: str | None) -> str:
    """The requirements.lock: pins with hashes, or plain ones, which say so."""
    python = environment.system.python
    lines = [f"# The packages of the run, on Python {python} ({environment.system.architecture})."]
    lines += [f"--extra-index-url {url}" for url in _list_indexes(environment)]
    if hashed is None:
        lines += [
            "# Plain pins: an installation does not record the hashes of the files that it came from.",
            "# `runs export --hashes` asks the package index for them.",
        ]
    return "\n".join(lines) + "\n" + (hashed or format_pins(environment))


def find_hashes(environment: RunEnvironment, environ: Mapping[str, str]) -> str:
    """The pins with the hashes of the files that the package index has for them.

    All or none: pip refuses a file in which some packages have hashes and others have none.

    Raises:
        UnfitError: uv is not installed.
        PrimusError: The index does not have a package, or does not answer.
    """
    uv = find_uv()
    if uv is None:
        raise UnfitError("--hashes needs uv, which is not on PATH", "pip install uv, or export without --hashes")
    words = [uv, "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate"]
    # With this interpreter, uv does not start every one on PATH to find the version.
    words += ["--python", sys.executable, "--python-version", environment.system.python]
    words += [word for url in _list_indexes(environment) for word in ("--extra-index-url", url)]
    try:
        done = subprocess.run(
            [*words, "-"],
            input=format_pins(environment),
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=HASH_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrimusError(f"--hashes: uv does not answer: {error}", "export without --hashes") from None
    problem = " ".join(done.stderr.split())[:400] if done.returncode else _find_package_without_hash(done.stdout)
    if problem:
        raise PrimusError(f"--hashes: {problem}", "export without --hashes: the lock then has plain pins")
    return done.stdout


def _find_package_without_hash(lock: str) -> str:
    for requirement in re.split(r"\n(?=\w)", lock.strip()):
        if requirement and "--hash=" not in requirement:
            return f"the index has no hash of {requirement}"
    return ""


def _list_indexes(environment: RunEnvironment) -> list[str]:
    """The index of a build of PyTorch that the main index does not have, such as 2.13.0+cpu."""
    build = environment.packages.get("torch", "").partition("+")[2]
    return [f"{PYTORCH_INDEX}/{build}"] if re.fullmatch(r"cpu|cu\d+|rocm[\d.]+", build) else []


def choose_base(environment: RunEnvironment) -> str:
    """The image to build on: that of the run, else one with its Python, or that of its kind of GPU."""
    if environment.image:
        return environment.image
    facts = environment.system.facts
    vendors = {device.vendor for device in facts.devices} if facts else set()
    if len(vendors) == 1:
        return read_template(vendors.pop()).base
    return f"docker.io/library/python:{environment.system.python}-slim"


def format_dockerfile(environment: RunEnvironment, run: Run, command: Sequence[str], *, has_hashes: bool) -> str:
    """The Dockerfile that rebuilds the environment, with the run imported."""
    place = f"{PLACE}/{CHECKOUT}"
    pip = "python3 -m pip install --no-cache-dir --no-deps" + " --require-hashes" * has_hashes
    paths = [f"ENV PATH={place}:$PATH PYTHONPATH={place}/src"] if environment.has_checkout else []
    return "\n".join(
        [
            f"# The environment of run {run.id}. In the unpacked archive: docker build -t {run.id} .",
            f"ARG BASE={choose_base(environment)}",
            "FROM ${BASE}",
            f"COPY . {PLACE}",
            # With no package index at hand: PIP_INSTALL=true, and a base that has the packages.
            f'ARG PIP_INSTALL="{pip}"',
            f"RUN ${{PIP_INSTALL}} -r {PLACE}/{LOCK}",
            *paths,
            "WORKDIR /workspace",
            f"RUN primus-cli direct -- runs import {PLACE} --workspace output",
            f"CMD {json.dumps(command)}",
            "",
        ]
    )


def format_readme(
    environment: RunEnvironment, run: Run, experiment: str, command: Sequence[str], *, has_data: bool
) -> str:
    """The README.md: what the archive is, and how to repeat the run."""
    item, system = summarize_run(run), environment.system
    sources = read_source_record(run)
    loss = "unknown" if item.last_loss is None else f"{item.last_loss:.6g}"
    version = str(sources) if sources and sources.revision else environment.packages.get("primus", "unknown")
    devices = ", ".join(system.devices) or "no accelerator"
    data = "is in `data/`" if has_data else "is not here: its fingerprint is in `run/config/data_config.yaml`"
    return "\n".join(
        [
            f"# Run {run.id} of {experiment}",
            "",
            f"It took {item.steps} steps to a loss of {loss}, with primus {version}.",
            f"Machine: {system.cpu_model}, {system.cpu_cores} cores; {devices}; Python {system.python}.",
            "`run/` is the run folder: request, configuration with origins, environment, logs, events, results.",
            "A replay executes the patches in `run/env/patches`, and needs the plug-ins in `run/env/plug-ins`, if any.",
            f"The data {data}. `MANIFEST.json` has the SHA-256 of each file.",
            "Import: `primus-cli direct -- runs import FILE` (this file, or the folder that it unpacks to).",
            f"Repeat: `{shlex.join(command)}`",
            "On the same kind of machine the losses are the same; on another one the command names the differences.",
            "RunEnvironment: `docker build -t run .` here, or `pip install --no-deps -r requirements.lock`.",
            "`<home>`, `<workspace>`, `<folder>`, `<checkout>` and `<environment>` stand for folders of that machine.",
            "",
        ]
    )
