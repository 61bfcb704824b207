"""The files that rebuild the environment fit the run: base image, index of PyTorch, hashes."""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from primus.errors import PrimusError
from primus.machine.facts import Device, MachineFacts
from primus.run_archive import guide_files
from primus.run_archive.guide_files import RunEnvironment
from primus.runs.snapshot import SystemInfo

HASH = "0123456789abcdef" * 4


def make_environment(
    packages: dict[str, str], image: str = "", vendor: str = "", *, has_checkout: bool = True
) -> RunEnvironment:
    devices = (Device(index=0, vendor=vendor),) if vendor else ()  # type: ignore[arg-type]
    system = SystemInfo(
        host="a",
        kernel="6.1",
        architecture="x86_64",
        python="3.12.1",
        cpu_model="Abacus 1",
        cpu_cores=2,
        memory_bytes=1,
        facts=MachineFacts(devices=devices),
    )
    return RunEnvironment(packages=packages, system=system, image=image, has_checkout=has_checkout)


def test_the_base_is_the_image_of_the_run_or_that_of_its_machine() -> None:
    assert guide_files.choose_base(make_environment({})) == "docker.io/library/python:3.12.1-slim"
    assert "rocm" in guide_files.choose_base(make_environment({}, vendor="amd"))
    assert "nvcr.io" in guide_files.choose_base(make_environment({}, vendor="nvidia"))
    digest = "docker.io/rocm/primus@sha256:" + "a" * 64
    assert guide_files.choose_base(make_environment({}, digest, "amd")) == digest


def test_a_build_of_pytorch_names_its_index() -> None:
    lock = guide_files.format_lock(make_environment({"primus": "0.1.0", "torch": "2.13.0+rocm7.2"}), None)
    assert "--extra-index-url https://download.pytorch.org/whl/rocm7.2\n" in lock
    assert "\ntorch==2.13.0+rocm7.2\n" in lock and "primus" not in lock
    without = guide_files.format_lock(
        make_environment({"primus": "0.1.0", "torch": "2.13.0"}, has_checkout=False), None
    )
    assert "--extra-index-url" not in without and "\nprimus==0.1.0\n" in without


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index (PEP 503) with one wheel with its hash, and one without."""
    for name, fragment in (("tiny-thing", f"#sha256={HASH}"), ("other-thing", "")):
        (tmp_path / "simple" / name).mkdir(parents=True)
        wheel = f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(tmp_path / wheel, "w") as archive:
            folder = f"{name.replace('-', '_')}-1.0.dist-info"
            archive.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{folder}/RECORD", "")
        (tmp_path / "simple" / name / "index.html").write_text(f'<a href="/{wheel}{fragment}">{wheel}</a>')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
        server.shutdown()
        thread.join(timeout=10)


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_hashes_are_those_of_the_index_and_of_all_packages(index: str, tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(tmp_path / "cache")}
    environ |= {"NO_PROXY": "127.0.0.1", "UV_HTTP_TIMEOUT": "10"}
    environment = make_environment({"tiny-thing": "1.0"})
    found = guide_files.find_hashes(environment, environ)
    assert f"--hash=sha256:{HASH}" in found
    lock = guide_files.format_lock(environment, found)
    assert "Plain pins" not in lock and "tiny-thing==1.0" in lock
    for other, said in (("other-thing", "no hash of other-thing==1.0"), ("absent-thing", "absent-thing")):
        with pytest.raises(PrimusError) as failed:
            guide_files.find_hashes(make_environment({"tiny-thing": "1.0", other: "1.0"}), environ)
        assert said in failed.value.problem and "plain pins" in failed.value.hint
