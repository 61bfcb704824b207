"""Read the configuration of pip, query package indexes, and run pip or uv."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from primus.web.session import HttpSession, NoResponseError

REACH_S = 5.0
"""An index that does not answer in this time counts as unreachable; pip itself retries for minutes."""
QUERY_LIMIT_S = 120.0
CONFIGURED = ("index-url", "extra-index-url", "find-links", "no-index", "cert")


@dataclass(frozen=True)
class PipConfig:
    """Configuration of pip, from its files and variables."""

    values: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def get(self, name: str) -> tuple[str, ...]:
        """Values of an option such as ``extra-index-url``."""
        return self.values.get(name, ())

    @property
    def is_offline(self) -> bool:
        """Whether pip uses no index."""
        return any(value.lower() in ("1", "true", "yes", "on") for value in self.get("no-index"))

    @property
    def has_sources(self) -> bool:
        """Whether a source other than PyPI is configured."""
        return any(self.get(name) for name in ("index-url", "extra-index-url", "find-links"))


def read_pip_config() -> PipConfig:
    """The configuration of this interpreter's pip; environment variables take precedence over its files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    text = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    values: dict[str, tuple[str, ...]] = {}
    lines = [re.match(r"([\w:.-]+?)\.([\w-]+)='?(.*?)'?$", line) for line in text.splitlines()]
    # Environment variables are sorted last, so that they override the files.
    for match in sorted(filter(None, lines), key=lambda match: match[1] == ":env:"):
        if match[2] in CONFIGURED and match[1] in ("global", "install", ":env:", "site", "user"):
            values[match[2]] = tuple(match[3].replace("\\n", " ").split())
    return PipConfig(values)


def list_versions(options: Sequence[str], log: TextIO) -> list[str]:
    """Versions of PyTorch that pip finds for this interpreter and machine; empty if it finds none."""
    # No retries: an unreachable index must fail fast, because the next source is tried after it.
    limits = ["--timeout", f"{REACH_S:g}", "--retries", "0", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", *limits, *options]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=QUERY_LIMIT_S,
            env=_build_environment(),
        )
    except subprocess.TimeoutExpired:
        return []
    log.write(f"$ {mask(' '.join(command))}\n{mask(done.stdout + done.stderr)}")
    log.flush()
    match = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return match[1].split(", ") if match else []


@dataclass(frozen=True)
class Page:
    """Response of an index."""

    status: int = 0
    """Status; 0 without a response."""
    text: str = ""
    length: int | None = None
    """Bytes, as the index states them."""
    problem: str = ""


def open_page(url: str, config: PipConfig, method: str = "GET") -> Page:
    """The page at `url`."""
    ca_file = next(iter(config.get("cert")), None)
    session = HttpSession({"User-Agent": "primus-cli"}, timeout_s=REACH_S, max_bytes=32 << 20, ca_file=ca_file)
    try:
        answer = session.send_within(2 * REACH_S, method, url)
    except NoResponseError as error:
        # With a certificate that is not trusted here it is reachable, and pip may trust it.
        return Page(int(error.is_untrusted), problem=str(error))
    length = answer.headers.get("Content-Length")
    problem = "" if answer.status < 300 else f"HTTP status {answer.status}"
    return Page(answer.status, answer.content.decode(errors="replace"), int(length) if length else None, problem)


def find_size(page: Page, index: str, version: str, config: PipConfig) -> int | None:
    """Bytes of the wheel of PyTorch `version` for this interpreter, from the page of an index; None if it is not
    stated.
    """
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    machine = sysconfig.get_platform().rpartition("-")[2]
    for link in re.findall(r'href="([^"#]+\.whl)', page.text):
        name = urllib.parse.unquote(link.rpartition("/")[2])
        fits = name.endswith((f"{machine}.whl", "any.whl")) and (f"-{python}-{python}-" in name or "-py3-none-" in name)
        if name.startswith(f"torch-{version}-") and fits:
            return open_page(urllib.parse.urljoin(f"{index.rstrip('/')}/torch/", link), config, "HEAD").length
    return None


def find_uv() -> str | None:
    """Path of uv; None if it is not installed or $PRIMUS_INSTALLER is pip."""
    return None if os.environ.get("PRIMUS_INSTALLER") == "pip" else shutil.which("uv")


def install(
    root: Path, requirements: Sequence[str], options: Sequence[str], config: PipConfig, uv: str | None, log: TextIO
) -> int:
    """Install into this interpreter's environment; gives the exit code.

    Args:
        root: Folder of the checkout, which is ``.`` in the requirements.
        requirements: Words such as ``--editable .[native]``, and files of constraints.
        options: Further sources, as options of pip.
        config: Configuration of pip, which uv does not read.
        uv: Path of uv; None uses pip.
        log: Receives the output of the installer.
    """
    command, environ = build_install_command(sys.executable, [*options, *requirements], config, uv)
    # Without credentials, because users attach this log to bug reports.
    log.write(f"$ {mask(' '.join(command))}\n")
    log.flush()
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, cwd=root).returncode


def ensure_pip(log: TextIO) -> None:
    """Give this environment the pip that comes with Python, without a network."""
    command = [sys.executable, "-m", "ensurepip"]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_build_environment())


def build_install_command(
    python: str, words: Sequence[str], config: PipConfig, uv: str | None
) -> tuple[list[str], dict[str, str]]:
    """The command that installs into the environment of `python`, and its variables.

    Args:
        python: Interpreter of the environment.
        words: Requirements, files of constraints, and further sources as options of pip.
        config: Configuration of pip, which uv does not read.
        uv: Path of uv; None uses pip.
    """
    environ = _build_environment()
    if not uv:
        return [python, "-m", "pip", "install", *words], environ
    # uv does not read pip's configuration, so it is translated into options.
    # unsafe-best-match is the strategy of pip. PyTorch's indexes also have old versions of other packages.
    command = [uv, "pip", "install", "--python", python, "--index-strategy", "unsafe-best-match"]
    if config.get("cert"):
        environ.setdefault("SSL_CERT_FILE", config.get("cert")[0])
    return [*command, *_build_uv_options(config, environ), *words], environ


def find_installed_version(name: str) -> str | None:
    """Version of a package in this environment, without shared folders."""
    from importlib.metadata import distributions

    return next((each.version for each in distributions(path=[sysconfig.get_path("purelib")], name=name)), None)


def uninstall(name: str, log: TextIO) -> None:
    """Remove a package from this environment."""
    command = [sys.executable, "-m", "pip", "uninstall", "--yes", name]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_build_environment())


def _build_uv_options(config: PipConfig, environ: dict[str, str]) -> list[str]:
    # Variables of uv are a more specific choice of the user than the configuration of pip.
    if any(name in environ for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_FIND_LINKS")):
        return []
    words = [word for name in CONFIGURED[:3] for value in config.get(name) for word in (f"--{name}", value)]
    return [*words, "--no-index"] if config.is_offline else words


def _build_environment() -> dict[str, str]:
    """Variables for pip: none that redirects the installation, no prompts."""
    environ = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_TARGET", "PIP_PREFIX")
    }
    return {**environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def mask(text: str) -> str:
    """`text` without the credentials of its URLs."""
    return re.sub(r"(\w+://)[^/\s@]+@", r"\1***@", text)


def ask_python(python: str, program: str, limit_s: float = 300.0) -> tuple[dict[str, object], str]:
    """Run a program; gives the last line of its output, read as JSON, and the last line of its standard error."""
    try:
        done = subprocess.run(
            [python, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
        )
        found = json.loads(done.stdout.strip().rpartition("\n")[2] or "{}")
    except subprocess.TimeoutExpired:
        return {}, f"no answer in {limit_s:g} s"
    except (OSError, ValueError) as error:
        return {}, str(error)
    return found, next(iter(reversed(done.stderr.strip().splitlines())), "")


def list_package_names(folders: Sequence[str]) -> set[str]:
    """Packages that are installed in `folders`, in lower case with hyphens."""
    from importlib.metadata import distributions

    return {normalize(each.metadata["Name"]) for each in distributions(path=list(folders)) if each.metadata["Name"]}


def normalize(name: str) -> str:
    """The name by which indexes compare packages (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_folder(text: str) -> Path | None:
    """The folder that a path or a file: URL names; None for other URLs."""
    if text.startswith("file:"):
        return Path(urllib.request.url2pathname(urllib.parse.urlsplit(text).path))
    return None if "://" in text else Path(os.path.expanduser(text))
