"""Folders, manifests and shapes of checkpoints, without a tensor library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fakes.disk_steps import record_disk_steps
from primus.checkpoint import checksum, folders, manifest
from primus.checkpoint.manifest import CheckpointManifest
from primus.checkpoint.shape import FIELDS, build_shape, check_same_shape
from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec
from primus.errors import PrimusError, UsageError


def checkpoint(folder: Path, step: int, content: bytes = b"tensors") -> Path:
    """A complete checkpoint of one file."""
    path = folders.name_step_folder(folder, step)
    path.mkdir(parents=True)
    (path / "data").write_bytes(content)
    manifest.write_manifest(path, describing(path, step))
    return path


def describing(path: Path, step: int, algorithm: str = checksum.BLAKE2B) -> CheckpointManifest:
    return CheckpointManifest(
        backend="native",
        run="run",
        step=step,
        consumed_samples=10 * step,
        model={"num_layers": 2},
        data_fingerprint="data",
        compiled=False,
        world_size=1,
        torch_version="2.13.0",
        created=1.0,
        algorithm=algorithm,
        files=[manifest.build_entry(path, "data", algorithm)],
    )


def test_a_manifest_reads_back_as_written(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    assert path.name == "step_00000100"
    assert manifest.read_manifest(path) == describing(path, 100)
    assert manifest.find_damage(path, describing(path, 100)) == ""


def test_a_checkpoint_is_complete_only_once_its_manifest_and_its_folder_are_on_disk(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    (path / manifest.MANIFEST_NAME).unlink()
    with record_disk_steps(path) as steps:
        manifest.write_manifest(path, describing(path, 100))
    assert steps == [("sync", ".manifest.json.tmp"), ("rename", "manifest.json"), ("sync", ".")]
    with record_disk_steps(tmp_path) as steps:
        manifest.write_manifest(path, describing(path, 100))
    assert steps[-1] == ("sync", "."), "the name of the folder itself"


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_changed_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
) -> None:
    path = checkpoint(tmp_path_factory.mktemp("c"), 1, content)
    written = manifest.read_manifest(path)
    assert written is not None
    position = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[position] ^= data.draw(st.integers(1, 255))
    (path / "data").write_bytes(changed)
    assert manifest.find_damage(path, written) == "data does not have its checksum"


def test_damage_names_the_file_and_what_is_wrong(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 1)
    written = describing(path, 1)
    (path / "data").write_bytes(b"short")
    assert manifest.find_damage(path, written) == "data has 5 bytes instead of 7"
    (path / "data").unlink()
    assert manifest.find_damage(path, written) == "data: No such file or directory"
    assert manifest.find_damage(path, written, part=1, parts=2) == "", "another process looks at it"


@pytest.mark.parametrize("content", [b"", b"{", b'{"step": "x"}', b"\xff\xfe", b"[]"])
def test_a_damaged_manifest_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = checkpoint(tmp_path, 1)
    (path / manifest.MANIFEST_NAME).write_bytes(content)
    with pytest.raises(PrimusError, match="damaged"):
        manifest.read_manifest(path)


def test_every_available_checksum_finds_a_change(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for algorithm in {checksum.choose_algorithm(), checksum.BLAKE2B}:
        file.write_bytes(b"a" * 1000)
        before = checksum.compute_checksum(file, algorithm)
        file.write_bytes(b"a" * 999 + b"b")
        assert checksum.compute_checksum(file, algorithm) != before
    with pytest.raises(PrimusError, match="unknown checksum 'md4'"):
        checksum.compute_checksum(file, "md4")


def test_only_complete_checkpoints_count_and_order_is_by_step(tmp_path: Path) -> None:
    for step in (100_000_000, 5, 20):
        checkpoint(tmp_path, step)
    folders.name_step_folder(tmp_path, 30).mkdir()
    (tmp_path / "step_x").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert [folders.parse_step(path) for path in folders.list_checkpoints(tmp_path)] == [5, 20, 30, 100_000_000]
    assert [folders.parse_step(path) for path in folders.find_candidates(str(tmp_path))] == [100_000_000, 20, 5]


def test_pruning_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step)
    (folders.name_step_folder(tmp_path, 2) / manifest.MANIFEST_NAME).unlink()
    folders.name_step_folder(tmp_path, 5).mkdir()
    deleted = folders.prune_checkpoints(tmp_path, keep=2)
    assert [folders.parse_step(path) for path in deleted] == [1, 2]
    assert [folders.parse_step(path) for path in folders.list_checkpoints(tmp_path)] == [3, 4, 5], (
        "5 may still be written"
    )


def test_nothing_is_pruned_before_one_is_complete(tmp_path: Path) -> None:
    folders.name_step_folder(tmp_path, 1).mkdir()
    assert folders.prune_checkpoints(tmp_path, keep=1) == []


def test_what_load_means(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = checkpoint(run / "checkpoints", 1), checkpoint(run / "checkpoints", 2)
    assert folders.find_candidates(str(first)) == [first]
    assert folders.find_candidates(str(run / "checkpoints")) == [second, first]
    assert folders.find_candidates(str(run)) == [second, first]
    (second / manifest.MANIFEST_NAME).unlink()
    with pytest.raises(UsageError, match=r"not complete: it has no manifest.json\s+complete ones there: step_00000001"):
        folders.find_candidates(str(second))


def test_two_ways_to_write_a_model_are_one_shape() -> None:
    spec = load_model("tiny")
    written_out = structs.replace(spec, kv_channels=spec.hidden_size // spec.num_attention_heads)
    assert build_shape(written_out) == build_shape(spec)
    check_same_shape(build_shape(spec), build_shape(written_out), "run")


def test_every_field_that_differs_is_named() -> None:
    spec = load_model("tiny")
    other = structs.replace(spec, hidden_size=128, vocab_size=1024)
    with pytest.raises(UsageError) as caught:
        check_same_shape(build_shape(spec), build_shape(other), "run")
    found = caught.value.problem
    assert found.startswith("load: run is of another model: hidden_size is 64 there and 128 here; ")
    assert f"; vocab_size is {spec.vocab_size} there and 1024 here" in found


def test_the_fields_of_a_shape_are_fields_of_a_model() -> None:
    assert set(FIELDS) <= set(ModelSpec.__struct_fields__)


def test_checkpoints_can_be_listed_and_verified_without_torch(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 1)
    program = (
        "import sys; from pathlib import Path; from primus.checkpoint import folders, manifest, shape; "
        "p = Path(sys.argv[1])\n"
        "assert folders.is_complete(p) and not manifest.find_damage(p, manifest.read_manifest(p))\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
