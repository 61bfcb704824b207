"""Small wheels that say that they are PyTorch, and a local package index in the form of pytorch.org's (PEP 503)."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

INIT = """\
import os
from torch import version
__version__ = version.__version__

class Sum:
    def __init__(self, value): self.value = value
    def sum(self): return self
    def item(self): return self.value

def ones(count, device="cpu"):
    if device != "cpu" and os.environ.get("FAKE_DEVICE_ERROR"):
        raise RuntimeError(os.environ["FAKE_DEVICE_ERROR"])
    return Sum(count)

class cuda:
    @staticmethod
    def device_count(): return int(os.environ.get("FAKE_DEVICES", "0"))
    @staticmethod
    def is_available(): return cuda.device_count() > 0
"""


def write_torch(site: Path, version: str, cuda: str | None = None, hip: str | None = None) -> None:
    """An importable PyTorch without tensors; $FAKE_DEVICES is how many devices it sees."""
    (site / "torch").mkdir(parents=True, exist_ok=True)
    for name, text in torch_files(version, cuda, hip).items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)


def torch_files(version: str, cuda: str | None, hip: str | None) -> dict[str, str]:
    """Text by path of the package and its metadata."""
    info = f"torch-{version}.dist-info"
    return {
        "torch/__init__.py": INIT,
        "torch/version.py": f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }


def make_wheel(folder: Path, version: str, platform: str = "any") -> Path:
    """The wheel of a version such as ``2.13.0+rocm7.2``, or of one without a build, which is for CUDA as PyPI's."""
    local = version.partition("+")[2]
    cuda = f"{local[2:-1]}.{local[-1]}" if local.startswith("cu") else None if local else "13.0"
    hip = f"{local[4:]}.5321" if local.startswith("rocm") else None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torch-{version}-py3-none-{platform}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in torch_files(version, cuda, hip).items():
            wheel.writestr(name, text)
    return path


def make_index(root: Path, **indexes: tuple[str, ...]) -> Path:
    """Folders like download.pytorch.org/whl: versions by the name of the index, where ``_`` is written for a dot.

    A version may be followed by a platform: ``2.13.0+cu130@manylinux_2_28_aarch64``.
    """
    root.mkdir(parents=True, exist_ok=True)
    for name, versions in indexes.items():
        folder = root / name.replace("_", ".") / "torch"
        links = []
        for text in versions:
            version, _, platform = text.partition("@")
            wheel = make_wheel(folder, version, platform or "any")
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            links.append(f'<a href="{wheel.name.replace("+", "%2B")}#sha256={digest}">{wheel.name}</a><br>')
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text("<!DOCTYPE html><html><body>\n" + "\n".join(links) + "\n</body></html>\n")
    return root


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The URL of `root` on a loopback server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
