"""A conversion is complete or absent, whatever happens to its source, its disk and its process."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_models import DENSE, draw_hub_tensors, make_spec
from primus.checkpoint import conversion, output
from primus.checkpoint.checksum import choose_algorithm, compute_checksum
from primus.checkpoint.conversion import write_checkpoint
from primus.checkpoint.convert import (
    AveragedWeights,
    TargetSettings,
    open_average,
    plan_conversion,
    write_conversion,
    write_model,
)
from primus.checkpoint.formats import huggingface
from primus.checkpoint.formats.dcp_output import HashedOutput
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, open_checkpoint
from primus.checkpoint.formats.safetensors_file import build_header, read_header
from primus.checkpoint.formats.tensor_bytes import read_tensor
from primus.checkpoint.output import WRITE_BYTES, OutputFile, OutputPlan
from primus.checkpoint.training_state import MOMENTS, SavedPosition, TrainingState
from primus.checkpoint.views import count_nonfinite
from primus.checkpoint.weights import TensorDict
from primus.cli.main import main
from primus.errors import PrimusError, UsageError
from primus.frameworks.megatron.torch_dist import plan_torch_dist
from primus.frameworks.native.checkpoint import plan_checkpoint

SPEC = make_spec(**DENSE["qwen3"])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of Hugging Face with three shards."""
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    opened = OpenedCheckpoint(TensorDict(draw_hub_tensors(SPEC)), SPEC, None, FoundCheckpoint("native", tmp_path, None))
    write_conversion(plan_conversion(opened, TargetSettings("huggingface")), tmp_path / "hub", lambda _: None)
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) == 3
    return tmp_path / "hub"


def run_cli(*args: object) -> int:
    return main(["direct", "--", "checkpoint", *map(str, args)])


def overwrite_first_value(file: Path, name: str, value: float) -> None:
    offset = read_header(file)[0][name].offset
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(torch.tensor([value]).numpy().tobytes())


def find_shard(hub: Path, name: str) -> Path:
    return hub / json.loads((hub / huggingface.INDEX).read_text())["weight_map"][name]


NORM = "model.layers.1.input_layernorm.weight"


def test_a_truncated_shard_is_named_with_its_size(hub: Path, tmp_path: Path, capsys: Any) -> None:
    shard = hub / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    assert run_cli("convert", hub, tmp_path / "out", "--to", "native") == 1
    assert f"{shard}: truncated" in capsys.readouterr().err
    os.truncate(shard, 100)
    with pytest.raises(PrimusError, match="not a safetensors file, or truncated in its header"):
        open_checkpoint(str(hub))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub"]


def test_a_missing_shard_is_named(hub: Path, tmp_path: Path, capsys: Any) -> None:
    (hub / "model-00003-of-00003.safetensors").unlink()
    assert run_cli("convert", hub, tmp_path / "out", "--to", "megatron") == 1
    assert "1 of 3 shards are missing, among them model-00003-of-00003" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused_by_the_first_tensor(hub: Path, tmp_path: Path, capsys: Any) -> None:
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    assert run_cli("convert", hub, tmp_path / "out", "--to", "native") == 1
    assert "down_proj.weight has shape [24, 40]; the model expects [24, 48]" in capsys.readouterr().err
    (hub / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert run_cli("show", hub) == 1
    assert "11 tensors are not part of the model, among them model.layers.1." in capsys.readouterr().err
    (hub / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert run_cli("show", hub) == 1
    assert "11 of 35 tensors are missing" in capsys.readouterr().err


def test_verify_finds_nan_and_a_copy_that_differs(hub: Path, capsys: Any) -> None:
    assert run_cli("verify", hub) == 0
    overwrite_first_value(find_shard(hub, NORM), NORM, float("nan"))
    capsys.readouterr()
    assert run_cli("verify", hub, "--json") == 1
    assert json.loads(capsys.readouterr().out)["findings"] == [f"{NORM}: 1 elements are NaN or infinite"]


def test_diff_measures_the_largest_difference(hub: Path, tmp_path: Path, capsys: Any) -> None:
    other = tmp_path / "other"
    shutil.copytree(hub, other)
    assert run_cli("diff", hub, other) == 0
    before = float(open_checkpoint(str(hub)).weights.read(NORM)[0])
    overwrite_first_value(find_shard(other, NORM), NORM, before + 2)
    capsys.readouterr()
    assert run_cli("diff", hub, other, "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["different"]
    assert (found["name"], found["different"]) == (NORM, 1)
    assert found["max_difference"] == pytest.approx(2, rel=1e-6)


FULL_DISK = """
import contextlib, io, json, os, resource, sys
from primus.checkpoint.formats import dcp_output  # takes seconds
from primus.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))
for target in json.loads(sys.argv[3]):
    if os.fork() == 0:
        sys.stderr = io.StringIO()
        code = main(["direct", "--", "checkpoint", "convert", sys.argv[1], sys.argv[2], "--to", *target])
        print(json.dumps([code, sys.stderr.getvalue(), os.listdir(os.path.dirname(sys.argv[2]))]), flush=True)
        os._exit(0)
    os.wait()
"""
TARGETS = (["huggingface"], ["native"], ["megatron"], ["torchtitan"], ["megatron", "--format", "torch"])


def test_a_full_disk_leaves_nothing_and_one_message(hub: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", FULL_DISK, str(hub), str(tmp_path / "out"), json.dumps(TARGETS)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=200, check=True)
    for target, line in zip(TARGETS, done.stdout.splitlines(), strict=True):
        code, said, left = json.loads(line)
        assert code == 1, (target, said)
        assert "out: cannot be written" in said and "Traceback" not in said, (target, said)
        assert left == ["hub"], target


KILLED = """
import os, signal, sys
from pathlib import Path
from primus.checkpoint import conversion
from primus.checkpoint.checksum import choose_algorithm, compute_checksum
from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion
from primus.checkpoint.formats import huggingface
from primus.checkpoint.formats.open import open_checkpoint
huggingface.SHARD_BYTES = 20_000
planned = plan_conversion(open_checkpoint(sys.argv[1]), TargetSettings("huggingface", "bf16"))
done = []
def report(count):
    done.append(count)
    if sum(done) > 25_000:
        os.kill(os.getpid(), int(sys.argv[3]))
write_conversion(planned, Path(sys.argv[2]), report)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_conversion_is_absent_and_continued_by_the_same_command(
    hub: Path, tmp_path: Path, number: signal.Signals
) -> None:
    target = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(hub), str(target), str(int(number))], timeout=300)
    assert killed.returncode == -number
    assert not target.exists()
    partial = conversion.name_partial_folder(target)
    with (partial / conversion.JOURNAL).open("a") as journal:
        journal.write('["model-0000')  # the line that a kill has torn
    opened = open_checkpoint(str(hub))
    planned = plan_conversion(opened, TargetSettings("huggingface", "bf16"))
    assert write_conversion(planned, target, lambda _: None) == 1
    written = open_checkpoint(str(target)).weights
    for name in opened.weights.list_tensors():
        assert torch.equal(written.read(name), opened.weights.read(name).bfloat16())
    assert not partial.exists() and not any(path.name.startswith(".") for path in target.iterdir())


def test_files_of_another_conversion_are_not_kept(hub: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(hub), str(target), str(int(signal.SIGKILL))]
    subprocess.run(command, timeout=300)
    planned = plan_conversion(open_checkpoint(str(hub)), TargetSettings("huggingface", "fp16"))
    assert write_conversion(planned, target, lambda _: None) == 0
    assert open_checkpoint(str(target)).weights.list_tensors()[NORM].dtype == torch.float16


def test_an_existing_target_is_refused_and_not_touched(hub: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("")
    assert run_cli("convert", hub, target, "--to", "native") == 2
    assert f"{target}: exists" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_a_plan_that_does_not_fit_on_the_disk_is_refused_before_it_is_written(tmp_path: Path) -> None:
    def write(*_: Any) -> None:
        raise AssertionError("nothing is written")

    plan = OutputPlan([OutputFile("a", 1 << 60, write)], lambda *_: None)
    with pytest.raises(PrimusError, match=r"GB are needed, and [\d,.]+ GB are free"):
        conversion.write_checkpoint(tmp_path / "out", plan, "")
    assert not list(tmp_path.iterdir())


def test_memory_is_that_of_a_part_whatever_the_model(tmp_path: Path) -> None:
    """0.8 GB of weights in fp32, converted with less than 0.3 GB more than the process had before."""
    spec = make_spec(num_layers=8, hidden_size=1024, ffn_hidden_size=4096, vocab_size=40000, kv_channels=64)
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion\n"
        "from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, open_checkpoint\n"
        "from primus.checkpoint.initial_weights import InitialWeights\n"
        "import msgspec; from primus.config.schema import ModelSpec\n"
        "spec = msgspec.json.decode(sys.argv[1], type=ModelSpec); folder = Path(sys.argv[2])\n"
        "if not (folder / 'hub').exists():\n"
        "    opened = OpenedCheckpoint(InitialWeights(spec, 1), spec, None, FoundCheckpoint('native', folder, None))\n"
        "    write_conversion(plan_conversion(opened, TargetSettings('huggingface')), folder / 'hub', lambda _: None)\n"
        "    sys.exit()\n"
        "import torch; torch.set_num_threads(1)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "planned = plan_conversion(open_checkpoint(str(folder / 'hub')), TargetSettings(sys.argv[3], 'bf16'))\n"
        "write_conversion(planned, folder / sys.argv[3], lambda _: None)\n"
        "print(planned.plan.num_bytes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)\n"
    )
    import msgspec

    command = [sys.executable, "-c", program, msgspec.json.encode(spec).decode(), str(tmp_path), "megatron"]
    subprocess.run(command, check=True, timeout=200)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    written, grown = map(int, done.stdout.split())
    assert written > 350e6 and grown < 300e6


def test_an_average_is_the_mean_in_float32() -> None:
    first, second = ({"a": torch.full((4,), value, dtype=torch.bfloat16)} for value in (1.0, 2.0))
    mean = AveragedWeights([TensorDict(first), TensorDict(second), TensorDict(second)])
    assert torch.equal(mean.read("a"), torch.full((4,), 5 / 3).bfloat16())
    with pytest.raises(UsageError, match="not of the same model"):
        AveragedWeights([TensorDict(first), TensorDict({"a": torch.ones(5)})])


def test_a_limit_of_the_file_size_is_an_error_here_too() -> None:
    # The test of a full disk relies on it: without Python's handling SIGXFSZ would end the process.
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN and resource.RLIMIT_FSIZE is not None


def test_a_large_tensor_is_mapped_and_equals_a_read_one_at_any_offset(tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    values = torch.randn(3 << 18, generator=torch.Generator().manual_seed(1))
    for offset in (0, 4, 4094, 4096, 5000):
        file.write_bytes(bytes(offset) + values.numpy().tobytes())
        assert torch.equal(read_tensor(file, offset, (3, 1 << 18), torch.float32), values.view(3, -1))
    os.truncate(file, 5000 + values.nbytes - 1)
    with pytest.raises(PrimusError, match="truncated"):
        read_tensor(file, 5000, (3, 1 << 18), torch.float32)


def test_a_mapped_tensor_may_outlive_its_file_and_be_changed_without_changing_it(tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(bytes(2 << 20))
    tensor = read_tensor(file, 0, (2 << 20,), torch.uint8)
    tensor += 1
    assert file.read_bytes() == bytes(2 << 20)
    file.unlink()
    assert int(tensor.sum()) == 2 << 20


def test_a_conversion_to_hugging_face_does_not_import_distributed_checkpoints() -> None:
    code = "import sys, primus.checkpoint.convert; print('torch.distributed.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("to", ["native", "megatron", "torchtitan"])
def test_a_file_of_several_types_loses_no_value(tmp_path: Path, to: Any) -> None:
    tensors = draw_hub_tensors(SPEC)
    for number, name in enumerate(tensors):
        tensors[name] = tensors[name].to((torch.bfloat16, torch.float16, torch.float32)[number % 3])
    opened = OpenedCheckpoint(TensorDict(tensors), SPEC, None, FoundCheckpoint("native", tmp_path, None))
    write_conversion(plan_conversion(opened, TargetSettings(to)), tmp_path / "out", lambda _: None)
    written = open_checkpoint(str(tmp_path / "out"), SPEC).weights
    for name, tensor in tensors.items():
        assert torch.equal(written.read(name).float(), tensor.float()), name


def test_names_behind_the_prefix_of_a_wrapper_are_read(hub: Path) -> None:
    expected = open_checkpoint(str(hub)).weights.read(NORM)
    (hub / huggingface.INDEX).unlink()
    for shard in hub.glob("*.safetensors"):
        stored = read_header(shard)[0]
        tensors = {f"_orig_mod.{name}": read_tensor(shard, place.offset, *place.info) for name, place in stored.items()}
        infos = TensorDict(tensors).list_tensors()
        shard.write_bytes(build_header(infos, {}) + b"".join(each.numpy().tobytes() for each in tensors.values()))
    assert torch.equal(open_checkpoint(str(hub)).weights.read(NORM), expected)


def save_as_pickles(hub: Path) -> None:
    """Replace the shards of a folder by files of `torch.save` with an index."""
    placed = {}
    for number, shard in enumerate(sorted(hub.glob("*.safetensors"))):
        stored, name = read_header(shard)[0], f"pytorch_model-{number}.bin"
        tensors = {each: read_tensor(shard, place.offset, *place.info).clone() for each, place in stored.items()}
        torch.save(tensors, hub / name)
        placed |= dict.fromkeys(tensors, name)
        shard.unlink()
    (hub / huggingface.INDEX).unlink()
    (hub / huggingface.PICKLE_INDEX).write_text(json.dumps({"weight_map": placed}))


def test_weights_in_pickles_are_read_as_tensors_if_they_are_trusted(hub: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(hub, tmp_path / "expected")
    save_as_pickles(hub)
    assert run_cli("convert", hub, tmp_path / "out", "--to", "huggingface") == 1
    assert "its weights are pickles, such as pytorch_model-0.bin" in (error := capsys.readouterr().err)
    assert "--trust-pickle" in error
    assert run_cli("convert", hub, tmp_path / "out", "--to", "huggingface", "--trust-pickle", "--verify") == 0
    assert run_cli("diff", tmp_path / "expected", tmp_path / "out") == 0


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_damaged_or_dangerous_pickles_of_weights_are_named_and_run_nothing(hub: Path, tmp_path: Path) -> None:
    save_as_pickles(hub)
    file = hub / "pytorch_model-1.bin"
    content, state = file.read_bytes(), torch.load(file, weights_only=True)
    first = min(state)
    broken: dict[str, Any] = {
        "damaged": content[: len(content) // 2],
        "damaged: ": b"",
        "damaged, or not a file of torch.save": b"123",
        f"lacks {first}": {name: tensor for name, tensor in state.items() if name != first},
        "its pickle names posix.mkdir, and may run code": {**state, "hook": RunsCode(tmp_path / "ran")},
        "has no tensors by name": [1],
    }
    for message, value in broken.items():
        file.write_bytes(value) if isinstance(value, bytes) else torch.save(value, file)
        with pytest.raises(PrimusError, match=f"pytorch_model-1.bin.*{message}"):
            open_checkpoint(str(hub), trust_pickle=True)
    torch.save(state, file, _use_new_zipfile_serialization=False)
    with pytest.raises(PrimusError, match=r"not a zip file, as PyTorch writes since 1\.6"):
        open_checkpoint(str(hub), trust_pickle=True)
    file.unlink()
    with pytest.raises(PrimusError, match=r"1 of 3 shards are missing, among them pytorch_model-1\.bin"):
        open_checkpoint(str(hub), trust_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_names_of_a_model_without_its_head_are_read(tmp_path: Path) -> None:
    for untied in (False, True):
        spec = make_spec(qk_layernorm=True, untie_embeddings_and_output_weights=untied)
        tensors = draw_hub_tensors(spec)
        base = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        torch.save(base, file := tmp_path / "pytorch_model.bin")
        if untied:
            with pytest.raises(PrimusError, match=r"1 of .* missing, among them lm_head.weight") as refused:
                open_checkpoint(str(file), spec, trust_pickle=True)
            assert "AutoModelForCausalLM" in refused.value.hint
            continue
        weights = open_checkpoint(str(file), spec, trust_pickle=True).weights
        assert all(torch.equal(weights.read(name), tensor) for name, tensor in tensors.items())


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_converted_only_if_they_are_asked_for(
    hub: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setattr(output, "CHUNK_BYTES", 512)  # five rows of the embedding: the two values are in two parts
    shard = find_shard(hub, EMBEDDING)
    place = read_header(shard)[0][EMBEDDING]
    for row in (0, 40):
        with shard.open("r+b") as opened:
            opened.seek(place.offset + row * 4 * place.info.shape[1])
            opened.write(torch.tensor([value]).numpy().tobytes())
    for target in ("huggingface", "native", "torchtitan", "megatron"):
        assert run_cli("convert", hub, tmp_path / "out", "--to", target, "--dtype", "bf16") == 1
        error = capsys.readouterr().err
        assert f"{hub}: {EMBEDDING} has 2 values that are NaN or infinite" in error and "--allow-nonfinite" in error
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hub"]
    assert run_cli("convert", hub, tmp_path / "out", "--to", "native", "--allow-nonfinite", "--verify") == 0
    said = capsys.readouterr().out
    assert f"1 tensors have NaN or infinite values, among them {EMBEDDING} with 2 of them" in said
    assert "logits not compared: those of the source are not finite" in said
    kept = open_checkpoint(str(tmp_path / "out")).weights.read(EMBEDDING)
    assert torch.equal(kept.isfinite().all(dim=1).nonzero().flatten(), torch.tensor([n for n in range(50) if n % 40]))


def test_an_optimizer_state_that_is_not_finite_is_refused_like_a_weight(tmp_path: Path) -> None:
    moments = {moment: TensorDict(draw_hub_tensors(SPEC)) for moment in MOMENTS}
    state = TrainingState(moments, 3, SavedPosition(3, 24))
    written = tmp_path / "native"
    write_checkpoint(written, plan_checkpoint(TensorDict(draw_hub_tensors(SPEC)), SPEC, 3, state), "x")
    write_model(written, SPEC)
    settings = TargetSettings("torchtitan", optimizer=True)
    write_conversion(plan_conversion(open_checkpoint(str(written)), settings), tmp_path / "good", lambda _: None)
    moments["exp_avg_sq"].read(NORM)[1] = float("inf")
    shutil.rmtree(written)
    write_checkpoint(written, plan_checkpoint(TensorDict(draw_hub_tensors(SPEC)), SPEC, 3, state), "x")
    write_model(written, SPEC)
    with pytest.raises(PrimusError, match=f"native, exp_avg_sq: {NORM} has 1 values that are NaN or infinite"):
        write_conversion(plan_conversion(open_checkpoint(str(written)), settings), tmp_path / "bad", lambda _: None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_weights_in_float32_beside_those_of_the_model_are_checked_too(tmp_path: Path) -> None:
    masters = draw_hub_tensors(SPEC)
    masters[NORM][2] = float("nan")
    moments = {moment: TensorDict(draw_hub_tensors(SPEC)) for moment in MOMENTS}
    state = TrainingState(moments, 3, SavedPosition(3, 24), masters=TensorDict(masters))
    write_checkpoint(tmp_path / "core", plan_torch_dist(TensorDict(draw_hub_tensors(SPEC)), SPEC, 3, state), "x")
    opened = open_checkpoint(str(tmp_path / "core"), SPEC)
    with pytest.raises(PrimusError, match=f"{NORM} has 1 values that are NaN or infinite"):
        write_conversion(
            plan_conversion(opened, TargetSettings("megatron", optimizer=True)), tmp_path / "out", lambda _: None
        )


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float64]
)
def test_values_that_are_not_finite_are_counted_in_every_type(dtype: torch.dtype) -> None:
    values = torch.ones(5, 3)
    assert count_nonfinite(values.to(dtype)) == count_nonfinite(values[:0].to(dtype)) == 0
    values[1, 2] = values[4, 0] = float("nan")
    assert count_nonfinite(values.to(dtype)) == 2


def test_an_average_has_the_step_of_its_last_checkpoint(tmp_path: Path) -> None:
    given = []
    for step in (2, 30):
        given.append(str(tmp_path / str(step)))
        write_checkpoint(Path(given[-1]), plan_checkpoint(TensorDict(draw_hub_tensors(SPEC)), SPEC, step, None), "x")
        write_model(Path(given[-1]), SPEC)
    assert open_average(given, None, False, lambda _: None).step == 30
    assert open_average(given[::-1], None, False, lambda _: None).step == 2


def test_an_average_with_a_checkpoint_that_is_not_finite_names_it(tmp_path: Path) -> None:
    given = []
    for name in ("good", "diverged"):
        tensors = draw_hub_tensors(SPEC)
        if name == "diverged":
            tensors["model.norm.weight"][1] = float("nan")
        given.append(str(tmp_path / name))
        write_checkpoint(Path(given[-1]), plan_checkpoint(TensorDict(tensors), SPEC, 1, None), "x")
        write_model(Path(given[-1]), SPEC)
    weights = open_average(given, None, False, lambda _: None).weights
    with pytest.raises(PrimusError, match=r"diverged: .* has 1 values that are NaN or infinite"):
        deque(map(weights.read, weights.list_tensors()), maxlen=0)


class ShortWrites(io.RawIOBase):
    """A file that takes at most 100,000 bytes at a time, and keeps the sizes that it was given."""

    def __init__(self) -> None:
        self.content, self.offered = bytearray(), list[int]()

    def write(self, data: Any) -> int:
        self.offered.append(len(data))
        self.content += data[:100_000]
        return min(len(data), 100_000)

    def fileno(self) -> int:
        return -1


def test_tensors_are_written_whole_in_parts_for_which_the_kernel_allocates_small_folios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, begun = os.urandom(3_000_001), list[tuple[int, int]]()
    monkeypatch.setattr(conversion, "WRITEBACK_BYTES", 1_000_000)
    monkeypatch.setattr(conversion, "_begin_writeback", lambda _, start, end: begun.append((start, end)))
    file = conversion._JoinedWrites(written := ShortWrites())  # type: ignore[arg-type]
    hashed = HashedOutput(file)  # type: ignore[arg-type]
    for part in (data[:10], data[10:200_000], data[200_000:200_020], data[200_020:]):
        assert hashed.write(part) == len(part)
    (tmp_path / "same").write_bytes(data)
    assert hashed.compute_checksum() == compute_checksum(tmp_path / "same", choose_algorithm())
    file.flush()
    assert bytes(written.content) == data and hashed.tell() == len(data)
    assert max(written.offered) == WRITE_BYTES
    starts, ends = zip(*begun, strict=True)
    assert starts == (0, *ends[:-1]) and 2_000_000 < ends[-1] <= len(data), "each part begins where the last one ended"


def test_the_disk_begins_to_write_a_file_without_changing_it(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(data := os.urandom(1 << 20))
        conversion._begin_writeback(file.fileno(), 0, len(data))
        file.seek(0)
        assert file.read() == data


def test_a_second_process_does_not_touch_files_that_the_first_one_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts when the journal is gone and the folder is not renamed yet."""
    outcomes: list[str] = []

    def write_one(file: Any, report: Any) -> None:
        file.write(b"content")

    plan = OutputPlan([OutputFile("file", 7, write_one)], lambda folder, records: None)

    def replace_late(source: Path, target: Path) -> None:
        if source == conversion.name_partial_folder(tmp_path / "out"):
            with pytest.raises(UsageError) as refused:
                conversion.write_checkpoint(tmp_path / "out", plan, "same")
            outcomes.append(refused.value.problem)
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "replace", replace_late)
    conversion.write_checkpoint(tmp_path / "out", plan, "same")
    assert len(outcomes) == 1 and outcomes[0].endswith("another process is writing it")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    conversion.write_checkpoint(tmp_path / "link", OutputPlan([], lambda folder, _: (folder / "a").touch()), "")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["a"] and (tmp_path / "link").is_symlink()
