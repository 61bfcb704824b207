"""Every format gives back the weights that were written, to us and to the library that the format belongs to."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from checkpoint_models import DENSE, NATIVE, SPARSE, draw_hub_tensors, make_spec
from primus.checkpoint import output
from primus.checkpoint.convert import MegatronFormat, TargetFormat, TargetSettings, plan_conversion, write_conversion
from primus.checkpoint.formats import adapter
from primus.checkpoint.formats import open as formats
from primus.checkpoint.formats.adapter import AdapterFiles
from primus.checkpoint.formats.dcp import DcpFolder
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, open_checkpoint
from primus.checkpoint.formats.safetensors_file import SafetensorsFile
from primus.checkpoint.output import RankGrid
from primus.checkpoint.renaming import EngineNames
from primus.checkpoint.weights import TensorDict, WeightReader
from primus.config.schema import ModelSpec
from primus.errors import PrimusError, UsageError

WITHOUT_CONFIG = ("deepseek_moe", "glm4_moe")
"""Families whose config.json is not written."""
SPECS = {name: make_spec(**extra) for name, extra in {**DENSE, **SPARSE}.items()}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def write(
    weights: WeightReader, spec: ModelSpec, target: Path, settings: TargetSettings, step: int | None = None
) -> Path:
    opened = OpenedCheckpoint(weights, spec, step, FoundCheckpoint("native", target.parent, step))
    write_conversion(plan_conversion(opened, settings), target, lambda _: None)
    return target


def assert_equal(weights: WeightReader, tensors: dict[str, torch.Tensor]) -> None:
    assert weights.list_tensors().keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name), tensor), name


@pytest.mark.parametrize(
    ("name", "to", "format"),
    [
        *((name, "huggingface", "torch_dist") for name in SPECS if name not in WITHOUT_CONFIG),
        *((name, to, "torch_dist") for name in SPECS for to in ("torchtitan", "megatron")),
        *((name, "native", "torch_dist") for name in NATIVE),
        *((name, "megatron", "torch") for name in (*DENSE, "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2 lite")),
    ],
)
def test_a_format_gives_back_model_and_weights(
    tmp_path: Path, name: str, to: TargetFormat, format: MegatronFormat
) -> None:
    spec = SPECS[name]
    hub = draw_hub_tensors(spec)
    grid = RankGrid(2, 2, 2 if spec.num_experts else 1) if format == "torch" else RankGrid()
    target = write(TensorDict(hub), spec, tmp_path / "out", TargetSettings(to, format=format, layout=grid), step=7)
    opened = open_checkpoint(str(target))
    assert_equal(opened.weights, hub)
    assert opened.step == (None if to in ("huggingface", "torchtitan") else 7)
    assert_equal(open_checkpoint(str(target), spec).weights, hub)


def test_large_tensors_are_written_and_read_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["qwen2.5"]
    hub = draw_hub_tensors(spec)
    monkeypatch.setattr(output, "CHUNK_BYTES", 1000)  # ten rows of the embedding
    weights: WeightReader = TensorDict(hub)
    # Each format is read in rows by the conversion to the next one.
    for number, to in enumerate(("huggingface", "native", "torchtitan", "megatron", "huggingface", "huggingface")):
        target = write(weights, spec, tmp_path / f"{number}-{to}", TargetSettings(to))  # type: ignore[arg-type]
        weights = open_checkpoint(str(target), spec).weights
        assert_equal(weights, hub)
    chunks = dcp.FileSystemReader(str(tmp_path / "1-native")).read_metadata().state_dict_metadata
    assert len(chunks["model.embedding.weight"].chunks) > 1  # type: ignore[union-attr]


def test_rows_of_a_file_are_those_of_its_tensor(tmp_path: Path) -> None:
    tensors = {"before": torch.randn(3), "values": torch.randn(6, 4, 2), "bytes": torch.arange(10, dtype=torch.int8)}
    tensors["halves"], tensors["none"] = torch.randn(5, 3).half(), torch.zeros(0, 4)
    AdapterFiles("hf:org/small", {}, tensors).write(tmp_path / "file")
    file = SafetensorsFile(tmp_path / "file" / adapter.WEIGHTS_FILE)
    for name, tensor in tensors.items():
        for rows in (None, slice(2, 4), slice(1, None), slice(0, 1), slice(0, 0)):
            assert torch.equal(file.read(name, rows), tensor if rows is None else tensor[rows]), (name, rows)


@pytest.mark.parametrize(("to", "prefix"), [("torchtitan", ""), ("native", "model.")])
def test_torch_distributed_checkpoint_loads_what_was_written(tmp_path: Path, to: Any, prefix: str) -> None:
    spec = SPECS["tied llama"]
    hub = TensorDict(draw_hub_tensors(spec))
    target = write(hub, spec, tmp_path / "out", TargetSettings(to))
    names = EngineNames(hub, spec, to)
    loaded = {prefix + name: torch.zeros(info.shape) for name, info in names.list_tensors().items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(str(target)), no_dist=True)
    for name in names.list_tensors():
        assert torch.equal(loaded[prefix + name], names.read(name)), name


def test_folders_of_torch_distributed_checkpoint_are_read_by_boxes(tmp_path: Path) -> None:
    stacked = torch.randn(3, 8, 6)
    # A view: saved with offset and strides of its own.
    dcp.save({"a": stacked, "b": torch.randn(12, 6)[2:9, 1:4]}, checkpoint_id=str(tmp_path), no_dist=True)
    folder = DcpFolder(tmp_path)
    assert torch.equal(folder.read_box("a", (1, 2, 1), (1, 5, 3)), stacked[1:2, 2:7, 1:4])
    assert torch.equal(folder.read("a", slice(1, 3)), stacked[1:])
    assert folder.read("b", slice(2, 4)).shape == (2, 3)


def test_metadata_that_names_a_function_is_refused_and_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(PrimusError, match=r"\.metadata: damaged, or not written by .*mkdir"):
        open_checkpoint(str(tmp_path))
    # A dotted name below a module that is allowed must not reach what that module imports.
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x04\x8c,torch.distributed.checkpoint.filesystem\x8c\x08os.mkdir\x93\x8c\x01x\x85R.".replace(
            b"\x8c,", b"\x8c" + bytes([len("torch.distributed.checkpoint.filesystem")])
        )
    )
    with pytest.raises(PrimusError, match="damaged, or not written by"):
        open_checkpoint(str(tmp_path))
    assert not (tmp_path / "ran").exists()


class OldPickler(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_python_3_11_2_is_read_and_reaches_members_of_enumerations_only(tmp_path: Path) -> None:
    hub = draw_hub_tensors(SPECS["tied llama"])
    target = write(TensorDict(hub), SPECS["tied llama"], tmp_path / "out", TargetSettings("native"))
    found = pickle.loads((target / ".metadata").read_bytes())
    with (target / ".metadata").open("wb") as file:
        OldPickler(file).dump(found)
    assert b"getattr" in (target / ".metadata").read_bytes()
    assert_equal(open_checkpoint(str(target)).weights, hub)

    class Attack:
        def __reduce__(self) -> Any:
            return getattr, (dcp.FileSystemReader, "__init__")

    (target / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(PrimusError, match=r"damaged, or not written by .*getattr|names torch"):
        open_checkpoint(str(target))


def test_a_pickle_of_a_rank_is_loaded_only_if_it_is_trusted(tmp_path: Path) -> None:
    spec = SPECS["llama"]
    hub = draw_hub_tensors(spec)
    target = write(TensorDict(hub), spec, tmp_path / "out", TargetSettings("megatron", format="torch"))
    file = target / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=True)
    # Megatron's own files have their arguments, and generators of numpy, besides the weights.
    torch.save({**state, "args": subprocess.CompletedProcess([], 0)}, file)
    with pytest.raises(PrimusError, match="may run code when it is loaded") as refused:
        open_checkpoint(str(target))
    assert "--trust-pickle" in refused.value.hint
    assert_equal(open_checkpoint(str(target), trust_pickle=True).weights, hub)


def test_megatron_core_loads_the_weights_and_computes_the_same_logits(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    spec = make_spec(num_query_groups=2, rotary_base=10000.0)
    target = write(TensorDict(draw_hub_tensors(spec)), spec, tmp_path / "out", TargetSettings("megatron"))
    program = Path(__file__).parent / "megatron_core_logits.py"
    command = [sys.executable, str(program), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "RANK": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["missing"] == [] and result["saved_again_equal"]
    # Two implementations of attention in float32; a wrong order of rows differs by more than 1.
    assert result["difference"] < 1e-4


def test_sharded_files_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primus.checkpoint.formats.huggingface.SHARD_BYTES", 20_000)
    spec = SPECS["llama"]
    hub = draw_hub_tensors(spec)
    target = write(TensorDict(hub), spec, tmp_path / "out", TargetSettings("huggingface"))
    index = json.loads((target / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in hub.values())
    assert_equal(open_checkpoint(str(target)).weights, hub)


KNOWN_BY_VLLM = {
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekForCausalLM", "DeepseekV2ForCausalLM"),
    *("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM"),
}
"""Of `_TEXT_GENERATION_MODELS` in vLLM's model_executor/models/registry.py."""


# No config.json is written for the other two, and the command says so.
@pytest.mark.parametrize("kind", sorted(set(SPECS) - {"deepseek_moe", "glm4_moe"}))
def test_an_export_has_what_the_loader_of_vllm_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As of vLLM's registry.py (architectures) and weight_utils.py (it drops files that the index does not name)."""
    monkeypatch.setattr("primus.checkpoint.formats.huggingface.SHARD_BYTES", 20_000)
    spec = SPECS[kind]
    target = write(TensorDict(draw_hub_tensors(spec)), spec, tmp_path / "out", TargetSettings("huggingface", "bf16"))
    config = json.loads((target / "config.json").read_text())
    assert len(config["architectures"]) == 1 and set(config["architectures"]) <= KNOWN_BY_VLLM
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["vocab_size"] == spec.vocab_size and config["max_position_embeddings"] > 0
    placed = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in placed) == (not config["tie_word_embeddings"])
    found = {}
    for file in target.glob("*.safetensors"):
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header.pop("__metadata__") == {"format": "pt"}
        found |= dict.fromkeys(header, file.name)
    assert found == placed
    assert not [file for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in target.glob(pattern)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_are_cast_except_the_bias_that_balances_experts(tmp_path: Path, dtype: Any) -> None:
    spec = SPECS["deepseek_v3"]
    target = write(TensorDict(draw_hub_tensors(spec)), spec, tmp_path / "out", TargetSettings("huggingface", dtype))
    dtypes = {name: info.dtype for name, info in open_checkpoint(str(target)).weights.list_tensors().items()}
    assert dtypes.pop("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
    assert dtypes.pop("model.layers.2.mlp.gate.e_score_correction_bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16 if dtype == "bf16" else torch.float16}
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == str(
        next(iter(dtypes.values()))
    ).removeprefix("torch.")


def test_a_name_of_the_hub_is_found_in_the_cache_and_else_refused_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS["llama"]
    hub = draw_hub_tensors(spec)
    cached = tmp_path / "hub" / "models--org--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "refs" / "v2").write_text("def")
    (cached / "snapshots").mkdir()
    write(TensorDict(hub), spec, cached / "snapshots" / "abc", TargetSettings("huggingface"))
    changed = {name: tensor + 1 for name, tensor in hub.items()}
    write(TensorDict(changed), spec, cached / "snapshots" / "def", TargetSettings("huggingface"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_equal(open_checkpoint("hf:org/small").weights, hub)
    assert_equal(open_checkpoint("hf:org/small@v2").weights, changed)
    assert_equal(open_checkpoint("hf:org/small@def").weights, changed)
    for absent in ("hf:org/other", "hf:org/small@v3"):
        with pytest.raises(PrimusError, match=rf"{absent}: the hub is not accessed because HF_HUB_OFFLINE is set"):
            open_checkpoint(absent)


def test_adapters_name_the_revision_of_their_model_as_peft_does(tmp_path: Path) -> None:
    adapter.AdapterFiles("hf:org/small@v2", adapter.build_config({}, 8, 16, 0.0, 2), {}).write(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/small", "v2")
    assert adapter.find_base(tmp_path) == "hf:org/small@v2"


def test_adapters_name_a_folder_from_their_own_place_and_one_in_the_cache_by_its_model(tmp_path: Path) -> None:
    base, cached = tmp_path / "shared/models/own", tmp_path / "hub/models--org--small/snapshots/abc"
    folder = tmp_path / "shared/runs/r/checkpoints/step_00000004/adapter"
    for path in (base, cached):
        path.mkdir(parents=True)
    assert adapter.name_base(f"hf:{cached}", folder) == ("org/small", "abc")
    adapter.AdapterFiles(str(base), adapter.build_config({}, 8, 16, 0.0, 2), {}).write(folder)
    assert str(tmp_path) not in (folder / "adapter_config.json").read_text()
    (tmp_path / "shared").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / folder.relative_to(tmp_path / "shared")
    assert Path(adapter.find_base(moved)).resolve() == tmp_path / "moved/models/own"
    (tmp_path / "moved/models/own").rmdir()
    with pytest.raises(UsageError, match=r"adapter_config.json: its model \.\./.*models/own does not exist"):
        adapter.find_base(moved)


@pytest.mark.parametrize("given", ["checkpoints", "checkpoints/20", "checkpoints/20/items"])
def test_a_checkpoint_of_orbax_is_refused_with_the_program_that_converts_it(tmp_path: Path, given: str) -> None:
    """The files are those that Orbax 0.12.4 writes for MaxText."""
    for name in ("_CHECKPOINT_METADATA", "items/_METADATA", "items/manifest.ocdbt", "items/d/ab12"):
        path = tmp_path / "checkpoints/20" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(UsageError, match="checkpoints of Orbax") as error:
        open_checkpoint(str(tmp_path / given))
    assert "maxtext.checkpoint_conversion.to_huggingface" in error.value.hint


def test_a_folder_without_its_model_is_refused_with_the_option_that_names_it(tmp_path: Path) -> None:
    spec = SPECS["llama"]
    target = write(TensorDict(draw_hub_tensors(spec)), spec, tmp_path / "out", TargetSettings("torchtitan"))
    (target / formats.MODEL_FILE).unlink()
    with pytest.raises(UsageError, match="does not name its model") as refused:
        open_checkpoint(str(target))
    assert "--model" in refused.value.hint
