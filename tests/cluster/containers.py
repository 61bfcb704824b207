"""A container image of this machine's own files, and engines with storage of their own: no registry, nothing shared."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from components import WHERE
from fakes import cli

PROGRAMS = (
    "sh bash env cat ls sed cksum uname dirname readlink sleep true false id nproc hostname touch rm mkdir stat head"
    " chown"
).split()
LIBRARIES = (
    "libstdc++.so.6 libgcc_s.so.1 libgomp.so.1 libm.so.6 libdl.so.2 librt.so.1 libpthread.so.0 libutil.so.1".split()
)
"""What torch and the interpreter load besides what their programs name."""
FILES = ("/etc/os-release", "/etc/ld.so.cache", "/etc/nsswitch.conf", "/etc/localtime")
INTERPRETER = (sys.prefix, sysconfig.get_path("stdlib") if sys.base_prefix == "/usr" else sys.base_prefix)
"""Folders of this interpreter, which a container is to see; of the system's own one the library."""
INSIDE_PATH = f"{sys.prefix}/bin:/usr/bin:/bin"

RUNTIME = """\
#!/bin/sh
# runc, asked for no more than root may grant here: some machines' root lacks CAP_SYS_RESOURCE.
case " $* " in
*" create "* | *" exec "*) {python} - "$@" <<'PYTHON' || exit 1 ;;
import json, os, resource, sys
args = sys.argv[1:]
def value(*names):
    return next((args[i + 1] for i, a in enumerate(args[:-1]) if a in names), None)
path = value("--process", "-p") if "exec" in args else os.path.join(value("--bundle", "-b") or ".", "config.json")
if path:
    document = json.load(open(path))
    process = document.get("process", document)
    for limit in process.get("rlimits") or ():
        hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if hard != resource.RLIM_INFINITY:
            limit["hard"] = min(limit["hard"], hard)
            limit["soft"] = min(limit["soft"], limit["hard"])
    process.pop("oomScoreAdj", None)
    json.dump(document, open(path, "w"))
PYTHON
esac
exec {runc} "$@"
"""


def root_file_system(folder: Path) -> Path:
    """A folder with a shell, a few programs, and the libraries of this interpreter and of torch."""
    for name in (
        "usr/bin",
        "usr/lib",
        "usr/lib64",
        "usr/sbin",
        "etc",
        "tmp",
        "root",
        "proc",
        "sys",
        "dev",
        "run",
        "var/tmp",
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "tmp").chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path(f"/{name}").is_symlink():
            (folder / name).symlink_to(f"usr/{name}")
    programs = [found for name in PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin"))]
    modules = [str(path) for path in Path(sys.base_prefix).rglob("lib-dynload/*.so")]
    needed = {*programs, *_libraries([os.path.realpath(sys.executable), *programs, *modules])}
    cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, env={"PATH": WHERE}).stdout
    for name in LIBRARIES:
        needed |= set(re.findall(rf"^\s*{re.escape(name)} \(.*x86-64.*\) => (\S+)$", cache, re.MULTILINE)[:1])
    needed |= {os.path.realpath(sys.executable), *map(str, Path(sys.base_prefix, "bin").glob("python3*"))}
    for path in sorted({*needed, *FILES}):
        if os.path.exists(path) and not path.startswith(INTERPRETER):
            _put(Path(path), folder)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\n")
    return folder


def _libraries(files: list[str]) -> set[str]:
    said = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout
    return set(re.findall(r"(?:=> |^\s)(/\S+) \(0x", said, re.MULTILINE))


def _put(path: Path, folder: Path) -> None:
    """Copy what `path` leads to, under its own name."""
    place = folder / os.path.join(os.path.realpath(path.parent), path.name).lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        shutil.copy2(path, place)


class Podman:
    """podman with storage of its own, and one image.

    Args:
        folder: New folder for all that it keeps.
    """

    name = "podman"
    image = "localhost/primus-test:1"
    inside_path = INSIDE_PATH

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        runtime = _runtime(folder)
        (folder / "containers.conf").write_text(
            '[engine]\nruntime = "primus-test"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            f'[engine.runtimes]\nprimus-test = ["{runtime}"]\n'
        )
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n'
        )
        self.environ = {
            "CONTAINERS_CONF": f"{folder}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
        }
        self("import", "-q", "-c", f"ENV PATH={self.inside_path}", str(_archive(folder)), self.image)

    def __call__(self, *words: str, check: bool = True) -> str:
        """What the engine says to `words`."""
        environ = {**os.environ, **self.environ}
        done = subprocess.run([self.name, *words], env=environ, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def running(self) -> list[str]:
        """Names of the containers in which something runs."""
        return self("ps", "--format", "{{.Names}}").split()

    def remove(self, name: str) -> None:
        """End a container at once."""
        self("kill", name, check=False)
        self("rm", "-f", name, check=False)

    def end(self) -> None:
        """Remove every container and image of its storage, and unmount it."""
        self("rm", "-af", "-t", "0", check=False)
        self("rmi", "-af", check=False)
        _unmount(self.folder)


class Docker(Podman):
    """A docker daemon of its own, on a socket in its folder, without networks."""

    name = "docker"
    image = "primus-test:1"

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        runtimes = {"primus-test": {"path": str(_runtime(folder))}}
        (folder / "daemon.json").write_text(json.dumps({"runtimes": runtimes, "default-runtime": "primus-test"}))
        self.environ = {"DOCKER_HOST": f"unix://{folder}/socket", "DOCKER_CONFIG": str(folder)}
        places = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
        quiet = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
        with (folder / "log").open("wb") as log:
            self._daemon = subprocess.Popen(
                [
                    "dockerd",
                    "--config-file",
                    f"{folder}/daemon.json",
                    "-H",
                    self.environ["DOCKER_HOST"],
                    *places,
                    *quiet,
                ],
                env={**os.environ, "PATH": WHERE},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            cli.wait_for(lambda: self("version", "--format", "{{.Server.Version}}", check=False), "dockerd answers")
            self("import", "-c", f"ENV PATH={INSIDE_PATH}", str(_archive(folder)), self.image)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End what runs in it, and the daemon."""
        left = self("ps", "-aq", check=False).split()
        if left:
            self("rm", "-f", *left, check=False)
        self._daemon.terminate()
        try:
            self._daemon.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        _unmount(self.folder)


def _unmount(folder: Path) -> None:
    """Unmount what an engine has mounted in its folder, which could not be removed otherwise."""
    for place in reversed(_mounted(folder)):  # the engine may still be unmounting some itself
        subprocess.run(["umount", "-l", place], stderr=subprocess.DEVNULL, check=False)
    assert not _mounted(folder)


def _mounted(folder: Path) -> list[str]:
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [place for place in places if place.startswith(f"{folder}/")]


def _runtime(folder: Path) -> Path:
    """The OCI runtime that an engine starts."""
    runc = shutil.which("runc", path=WHERE) or shutil.which("crun", path=WHERE)
    (folder / "runtime").write_text(RUNTIME.format(python="/usr/bin/env python3", runc=runc))
    (folder / "runtime").chmod(0o755)
    return folder / "runtime"


def _archive(folder: Path) -> Path:
    """The image's files as one."""
    rootfs = root_file_system(folder / "rootfs")
    subprocess.run(["tar", "-C", str(rootfs), "--numeric-owner", "-cf", f"{folder}/image.tar", "."], check=True)
    shutil.rmtree(rootfs)
    return folder / "image.tar"


def mounts() -> list[str]:
    """Options by which a container sees this interpreter; the checkout, and what is in it, is seen anyway."""
    from primus import registry

    checkout = registry.PACKAGE.parents[1]
    places = [path for path in dict.fromkeys(INTERPRETER) if not Path(path).is_relative_to(checkout)]
    return [word for place in places for word in ("--mount", f"{place}:{place}:ro")]


def shell(*words: str, cwd: Path, typed: str) -> subprocess.CompletedProcess[str]:
    """The command with `typed` on its standard input."""
    script = "import sys\nfrom primus.cli.main import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=cwd,
        env=cli.environment(),
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
    )
