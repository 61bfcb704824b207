"""Two users share caches: the first fills them, the second reads them, and adds where the group may write."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from fakes import cli
from fakes.unix_users import UnixUser, make_public_place, make_shared_folder, make_users
from local_hub import LocalHub, Repo

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("huggingface_hub")
pytest.importorskip("pyarrow")

SHARED, READABLE, PRIVATE = 0o002, 0o022, 0o077
"""What the first user's umask leaves to the group."""
EXPERIMENT = """\
exp_name: night
modules:
  pre_trainer:
    framework: abacus
    model: tiny
    overrides: {mock_data: true, seq_length: 8, train_iters: 3}
"""
QUICKSTART = cli.SOURCE.parent / "examples" / "quickstart.yaml"


class Caches:
    """Two users, a hub, and a folder of the group for each cache."""

    def __init__(self, folder: Path, hub: LocalHub) -> None:
        self.first, self.second = make_users(folder)
        self.shared = make_shared_folder(folder / "shared")
        self.data = make_shared_folder(self.shared / "data")
        self.variables = {"HF_ENDPOINT": hub.url}
        for name in ("HF_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
            self.variables[name] = str(make_shared_folder(self.shared / name))
        self.hub = hub
        hub.repos["me/one"], hub.repos["me/two"] = make_model(), make_model()
        rows = b'{"text": "some words of a text"}\n' * 5
        hub.repos["me/data"] = Repo({"data/train-0.jsonl": rows, "data/train-1.jsonl": rows})
        (self.shared / "text.jsonl").write_bytes(rows)

    def run(
        self, user: UnixUser, umask: int, *words: str, code: int = 0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """A command below `direct --`; whatever it says is no traceback."""
        done = user.run("direct", "--", *words, cwd=self.shared, umask=umask, code=code, **(self.variables | env))
        assert "Traceback" not in done.stderr
        return done

    def prepare(self, user: UnixUser, umask: int, model: str, code: int = 0, **env: str) -> str:
        """Encode the text with a tokenizer of the hub; gives what is said."""
        words = ("data", "prepare", "--input", "text.jsonl", "--tokenizer", model, "--output")
        return self.run(user, umask, *words, f"data/{user.name}-{model[3:]}", code=code, **env).stderr


def make_model() -> Repo:
    """A tokenizer of bytes, as a model of the hub."""
    ids = {character: number for number, character in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids | {"<|endoftext|>": len(ids)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return Repo({"tokenizer.json": tokenizer.to_str().encode()})


@pytest.fixture
def caches() -> Iterator[Caches]:
    with make_public_place() as folder, LocalHub() as hub:
        yield Caches(folder, hub)


def test_a_tokenizer_that_another_user_downloaded_is_read_and_others_are_added(caches: Caches) -> None:
    caches.prepare(caches.first, SHARED, "me/one")
    caches.hub.log.clear()
    caches.prepare(caches.second, SHARED, "me/one")
    assert not caches.hub.sent("tokenizer.json")
    caches.prepare(caches.second, SHARED, "me/two")
    caches.hub.log.clear()
    caches.prepare(caches.first, SHARED, "me/two")
    assert not caches.hub.sent("tokenizer.json")


def test_a_cache_of_the_hub_that_is_only_readable_is_read_and_its_owner_named_for_more(caches: Caches) -> None:
    caches.prepare(caches.first, READABLE, "me/one")
    caches.prepare(caches.second, READABLE, "me/one")
    refused = caches.prepare(caches.second, READABLE, "me/two", code=1)
    cache = Path(caches.variables["HF_HOME"]) / "hub"
    assert f"me/two: the cache of the hub cannot be used: {cache}/models--me--two: Permission denied" in refused
    assert f"{cache} belongs to nobody, who can share it (chmod -R g+rwX {cache}, and umask 002)" in refused
    own = str(caches.second.home / "hub")
    caches.prepare(caches.second, READABLE, "me/two", HF_HUB_CACHE=own)


def test_a_newer_version_that_may_not_be_added_leaves_the_cached_one(caches: Caches) -> None:
    caches.prepare(caches.first, READABLE, "me/one")
    caches.hub.repos["me/one"].files["README.md"] = b"a newer commit"
    caches.hub.repos["me/one"].files["tokenizer.json"] += b" "
    refused = caches.prepare(caches.second, READABLE, "me/one", code=1)
    assert "HF_HUB_OFFLINE=1 takes what is cached" in refused
    caches.prepare(caches.second, READABLE, "me/one", HF_HUB_OFFLINE="1")


def test_a_private_cache_of_the_hub_is_refused_by_its_owners_name(caches: Caches) -> None:
    caches.prepare(caches.first, PRIVATE, "me/one")
    assert "hub belongs to nobody" in caches.prepare(caches.second, READABLE, "me/one", code=1)
    refused = caches.run(caches.second, READABLE, "checkpoint", "show", "hf:me/one", code=1).stderr
    assert "the cache of the hub cannot be used" in refused and "hub belongs to nobody" in refused


@pytest.mark.parametrize("umask", [SHARED, READABLE])
def test_a_dataset_that_another_user_fetched_is_read(caches: Caches, umask: int) -> None:
    fetch = ("data", "fetch", "me/data", "--output", "data/rows")
    caches.run(caches.first, umask, *fetch)
    caches.hub.log.clear()
    assert "all 2 files of me/data are present" in caches.run(caches.second, READABLE, *fetch).stderr
    assert caches.hub.log == []
    (caches.data / "rows" / "data" / "train-1.jsonl").unlink()
    code = 0 if umask == SHARED else 1
    again = caches.run(caches.second, umask, *fetch, code=code).stderr
    assert umask == SHARED or "data/rows belongs to nobody: give another --output" in again


def test_a_private_dataset_is_refused_by_its_owners_name(caches: Caches) -> None:
    fetch = ("data", "fetch", "me/data", "--output", "data/rows")
    caches.run(caches.first, PRIVATE, *fetch)
    assert "data/rows belongs to nobody" in caches.run(caches.second, READABLE, *fetch, code=1).stderr


@pytest.mark.slow
@pytest.mark.parametrize("umask", [SHARED, READABLE, PRIVATE])
def test_compiled_kernels_and_parsed_signatures_of_another_user_are_in_nobodys_way(caches: Caches, umask: int) -> None:
    pytest.importorskip("numba")
    (caches.shared / "x.log").write_text("RuntimeError: NCCL error\n")
    before = {path for path in Path("/tmp").iterdir() if path.name.startswith("primus-numba-")}
    for user in (caches.first, caches.second):
        mask = umask if user is caches.first else READABLE
        words = ("--input", "text.jsonl", "--output", f"data/kept-{user.name}")
        caches.run(user, mask, "data", "dedup", *words)
        caches.run(user, mask, "diagnose", "x.log")
    ours = Path(caches.variables["XDG_CACHE_HOME"]) / "primus"
    (signatures,) = ours.glob("signatures-*.msgpack")
    assert stat.S_IMODE(signatures.stat().st_mode) == 0o666 & ~umask
    own = [*(caches.second.home / ".cache" / "primus" / "numba").rglob("*.nbi")]
    assert bool(own) == (umask != SHARED)
    assert {path for path in Path("/tmp").iterdir() if path.name.startswith("primus-numba-")} == before


def test_a_state_folder_of_another_user_is_read_and_its_owner_named(caches: Caches) -> None:
    caches.run(caches.first, READABLE, "nodes", "add", "n3", "--reason", "GPU 5")
    done = caches.second.run("--json", "direct", "--", "nodes", "list", cwd=caches.shared, **caches.variables)
    assert [node["node"] for node in json.loads(done.stdout)["nodes"]] == ["n3"]
    refused = caches.run(caches.second, READABLE, "nodes", "add", "n4", "--reason", "x", code=1).stderr
    assert "primus/unfit-nodes belongs to nobody: choose another folder" in refused


def test_a_training_with_the_state_folder_of_another_user_runs(caches: Caches) -> None:
    (caches.shared / "night.yaml").write_text(EXPERIMENT)
    words = ("train", "pretrain", "--config", "night.yaml", "--workspace")
    for user in (caches.first, caches.second):
        caches.run(user, READABLE, *words, f"out-{user.name}")


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("umask", [SHARED, READABLE])
def test_compiled_graphs_and_prepared_data_of_another_user_are_used(caches: Caches, umask: int) -> None:
    """Inductor writes a lock for each graph that it reads: a cache that is only readable serves nobody else."""
    if not shutil.which("g++"):
        pytest.skip("Inductor needs a C++ compiler")
    first, second = (structs.replace(user, limit_s=400) for user in (caches.first, caches.second))
    shutil.copy(QUICKSTART, caches.shared)
    small = "--num_layers 1 --hidden_size 32 --ffn_hidden_size 64 --num_attention_heads 2 --num_query_groups 2"
    small += " --seq_length 32 --micro_batch_size 1 --train_iters 2 --compile true --auto_continue_train false"
    words = ("train", "pretrain", "--config", "quickstart.yaml", *small.split(), "--workspace")
    caches.run(first, umask, *words, "out-first", OMP_NUM_THREADS="1")
    prepared = list_folder(caches.data)
    compiled = list_folder(Path(caches.variables["TORCHINDUCTOR_CACHE_DIR"]), "*.so")
    assert prepared and compiled
    code = 0 if umask == SHARED else 1
    done = caches.run(second, umask, *words, "out-second", code=code, OMP_NUM_THREADS="1")
    assert list_folder(caches.data) == prepared
    assert list_folder(Path(caches.variables["TORCHINDUCTOR_CACHE_DIR"]), "*.so") == compiled
    if umask == READABLE:
        assert "give TORCHINDUCTOR_CACHE_DIR a folder of your own" in done.stderr


def list_folder(folder: Path, pattern: str = "*") -> dict[str, int]:
    """Files below a folder, and when they were written."""
    return {str(path): os.stat(path).st_mtime_ns for path in folder.rglob(pattern) if path.is_file()}
