"""Sources that say something else than they hold: each is read as what it is, or refused by one message."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from checkpoint_models import SPARSE, draw_hub_tensors, make_spec
from primus.checkpoint.convert import TargetSettings, compare_weights, open_average, plan_conversion, write_conversion
from primus.checkpoint.formats.huggingface import CONFIG, INDEX, SINGLE, check_copies
from primus.checkpoint.formats.open import MODEL_FILE, FoundCheckpoint, OpenedCheckpoint, open_checkpoint
from primus.checkpoint.formats.safetensors_file import build_header, read_header
from primus.checkpoint.formats.saved_shape import list_other_settings
from primus.checkpoint.formats.tensor_bytes import view_bytes
from primus.checkpoint.weights import TensorDict
from primus.cli.main import main
from primus.config.schema import ModelSpec
from primus.errors import PrimusError, UsageError

LLAMA = make_spec(hidden_size=48, kv_channels=8)


def write(tensors: Mapping[str, Tensor], spec: ModelSpec, target: Path, settings: TargetSettings) -> Path:
    opened = OpenedCheckpoint(TensorDict(tensors), spec, None, FoundCheckpoint("native", target.parent, None))
    write_conversion(plan_conversion(opened, settings), target, lambda _: None)
    return target


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A Llama in one file."""
    return write(draw_hub_tensors(LLAMA), LLAMA, tmp_path / "hub", TargetSettings("huggingface"))


def convert(source: Path, target: Path, to: Any = "huggingface") -> OpenedCheckpoint:
    opened = open_checkpoint(str(source))
    write_conversion(plan_conversion(opened, TargetSettings(to)), target, lambda _: None)
    return open_checkpoint(str(target))


def change_config(folder: Path, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(values))
    return values


def save(folder: Path, tensors: Mapping[str, Tensor], name: str = SINGLE) -> None:
    header = build_header(TensorDict(tensors).list_tensors(), {"format": "pt"})
    (folder / name).write_bytes(header + b"".join(view_bytes(tensor) for tensor in tensors.values()))


def read_all(folder: Path) -> dict[str, Tensor]:
    weights = open_checkpoint(str(folder)).weights
    return {name: weights.read(name).clone() for name in weights.list_tensors()}


# config.json


def test_a_folder_of_hugging_face_keeps_what_its_config_says_besides_the_model(hub: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}
    others = {"eos_token_id": [7, 9], "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    quantized = {"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"}
    before = change_config(hub, model_type="qwen2", architectures=["Qwen2ForCausalLM"], rope_parameters=rope, **others)
    spec = make_spec(hidden_size=48, kv_channels=8, add_qkv_bias=True)
    save(hub, draw_hub_tensors(spec))
    change_config(hub, **quantized)
    convert(hub, tmp_path / "out")
    after = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert after == before | {"dtype": "float32", "torch_dtype": "float32"}
    # Other formats lack what primus has no key for, and say so.
    lost = plan_conversion(open_checkpoint(str(hub)), TargetSettings("native")).lost
    assert [line.partition(":")[0] for line in lost] == [
        "rope_parameters.rope_type",
        "rope_parameters.factor",
        "sliding_window",
    ]


def test_a_model_that_was_saved_without_its_prediction_layers_has_none(tmp_path: Path) -> None:
    spec = make_spec(**SPARSE["deepseek_v3"])
    tensors = draw_hub_tensors(spec)
    hub = write(tensors, spec, tmp_path / "hub", TargetSettings("huggingface"))
    assert open_checkpoint(str(hub)).spec.mtp_num_layers == 1
    # As transformers saves it (modeling_deepseek_v3.py, _keys_to_ignore_on_load_unexpected).
    save(hub, {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.2.")})
    assert json.loads((hub / CONFIG).read_text())["num_nextn_predict_layers"] == 1
    opened = convert(hub, tmp_path / "core", "megatron")
    assert opened.spec.mtp_num_layers == 0 and len(opened.weights.list_tensors()) < len(tensors)


def test_a_window_makes_a_llama_a_mistral(tmp_path: Path) -> None:
    spec = make_spec(window_size=16)
    hub = write(draw_hub_tensors(spec), spec, tmp_path / "hub", TargetSettings("huggingface"))
    assert json.loads((hub / CONFIG).read_text())["architectures"] == ["MistralForCausalLM"]
    assert convert(hub, tmp_path / "native", "native").spec == spec


@pytest.mark.parametrize(
    ("text", "vision"), [("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")]
)
def test_the_language_model_of_a_multimodal_one_is_read(text: str, vision: str, tmp_path: Path) -> None:
    """The names of published files of Gemma 3, and those that transformers 5 writes."""
    gemma = {"zero_centered_norms": True, "scale_embeddings": True, "post_layernorm": True, "ffn_activation": "gelu"}
    gemma |= {"qk_layernorm": True, "untie_embeddings_and_output_weights": False, "hybrid_layer_pattern": "W*"}
    gemma |= {"query_pre_attn_scalar": 10, "window_rotary_base": 100.0, "rope_type": "linear"}
    spec = make_spec(**gemma, window_size=4, rotary_scaling_factor=8.0)
    tensors = draw_hub_tensors(spec)
    folder = write(tensors, spec, tmp_path / "whole", TargetSettings("huggingface"))
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({"model_type": "gemma3", "vision_config": {}, "text_config": config}))
    others = {f"{vision}embeddings.weight": torch.ones(2), f"{vision}post_layernorm.weight": torch.ones(2)}
    save(folder, {text + name.removeprefix("model."): each for name, each in tensors.items()} | others)
    opened = open_checkpoint(str(folder))
    assert opened.spec == spec
    for name, tensor in tensors.items():
        assert torch.equal(opened.weights.read(name), tensor), name


def test_a_checkpoint_that_says_sizes_only_is_not_converted_without_its_model(tmp_path: Path) -> None:
    spec = make_spec(rotary_base=500_000)
    native = write(draw_hub_tensors(spec), spec, tmp_path / "native", TargetSettings("native"))
    (native / MODEL_FILE).unlink()  # copied out of its run
    assert main(["direct", "--", "checkpoint", "show", str(native)]) == 0
    with pytest.raises(UsageError, match="not its whole model") as refused:
        plan_conversion(open_checkpoint(str(native)), TargetSettings("huggingface"))
    assert "--model" in refused.value.hint
    plan_conversion(open_checkpoint(str(native), spec), TargetSettings("huggingface"))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
def test_a_distributed_checkpoint_of_transformers_is_read_by_the_config_beside_it(
    hub: Path, tmp_path: Path, prefix: str
) -> None:
    tensors = read_all(hub)
    others = {"optim.lr": torch.ones(1)} if prefix else {}
    dcp.save({prefix + name: tensor for name, tensor in tensors.items()} | others, checkpoint_id=hub, no_dist=True)
    (hub / SINGLE).unlink()
    change_config(hub, eos_token_id=9)
    weights = convert(hub, tmp_path / "out").weights
    assert all(torch.equal(weights.read(name), tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["eos_token_id"] == 9


def test_settings_without_a_weight_in_which_the_experiment_differs_are_named(hub: Path) -> None:
    assert list_other_settings(str(hub), LLAMA) == []
    longer = make_spec(hidden_size=48, kv_channels=8, rotary_base=500_000.0, rope_type="llama3")
    assert list_other_settings(f"hf:{hub}", longer) == [
        "rotary_base is 10000.0 there and 500000.0 here",
        "rope_type is default there and llama3 here",
    ]


# Weights


def test_a_copy_that_differs_is_not_lost_in_silence(hub: Path, tmp_path: Path, capsys: Any) -> None:
    change_config(hub, tie_word_embeddings=True)
    with pytest.raises(PrimusError, match=r"lm_head.weight differs from model.embed_tokens.weight") as refused:
        check_copies(open_checkpoint(str(hub)).weights, str(hub))
    assert "tie_word_embeddings: false" in refused.value.hint
    assert main(["direct", "--", "checkpoint", "convert", str(hub), str(tmp_path / "out"), "--to", "native"]) == 1
    with pytest.raises(PrimusError, match=r"lm_head\.weight differs"):
        open_average([str(hub), str(hub)], None, False, lambda _: None)
    assert "lm_head.weight differs" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_values_beyond_float16_are_refused_and_not_made_infinite(hub: Path, tmp_path: Path) -> None:
    tensors = read_all(hub)
    tensors["model.norm.weight"][3] = 1e5
    save(hub, tensors)
    with pytest.raises(PrimusError, match=r"model.norm.weight has values up to 1e\+05") as refused:
        write_conversion(
            plan_conversion(open_checkpoint(str(hub)), TargetSettings("native", "fp16")), tmp_path / "out", print
        )
    assert "bf16" in refused.value.hint and sorted(path.name for path in tmp_path.iterdir()) == ["hub"]
    # What is infinite already stays so.
    tensors["model.norm.weight"][3] = float("inf")
    save(hub, tensors)
    settings = TargetSettings("native", "fp16", nonfinite=True)
    write_conversion(plan_conversion(open_checkpoint(str(hub)), settings), tmp_path / "out", print)


def test_an_average_refuses_nan_and_knows_all_its_sources(hub: Path, tmp_path: Path) -> None:
    shutil.copytree(hub, other := tmp_path / "other")
    given = [str(other), str(hub)]

    def plan() -> Any:
        return plan_conversion(open_average(given, None, False, lambda _: None), TargetSettings("native"))

    before = plan().fingerprint
    tensors = read_all(other)
    tensors["model.norm.weight"][3] = float("nan")
    save(other, tensors)
    assert plan().fingerprint != before
    with pytest.raises(PrimusError, match=r"other: model.norm.weight has 1 values that are NaN"):
        write_conversion(plan(), tmp_path / "out", print)


def test_quantized_weights_of_other_methods_are_named(hub: Path) -> None:
    tensors = read_all(hub)
    change_config(hub, quantization_config={"quant_method": "gptq", "bits": 4})
    packed = tensors.pop("model.layers.0.mlp.up_proj.weight").int()
    save(hub, tensors | {"model.layers.0.mlp.up_proj.qweight": packed})
    with pytest.raises(PrimusError, match=r"up_proj.weight") as refused:
        open_checkpoint(str(hub))
    assert "quantized by gptq" in refused.value.hint
    save(hub, tensors | {"model.layers.0.mlp.up_proj.weight": packed})
    with pytest.raises(PrimusError, match=r"up_proj.weight is int32, not a floating-point type"):
        open_checkpoint(str(hub))


# Files


def test_the_files_that_transformers_reads_are_read(hub: Path) -> None:
    expected = read_all(hub)
    shutil.copy(hub / SINGLE, hub / "consolidated.safetensors")
    (hub / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert read_all(hub).keys() == expected.keys()


def damage_header(content: bytes, name: str, **changes: Any) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[name] |= changes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def test_a_header_that_does_not_describe_its_file_is_refused(hub: Path) -> None:
    file = hub / SINGLE
    content = file.read_bytes()
    names = iter(read_header(file)[0])
    first, second = next(names), next(names)
    offsets = [0, 50 * 48 * 4]
    nested = b"[" * 100_000
    broken = {
        "4 bytes follow its last tensor": content + b"1234",
        "its header is damaged: maximum recursion": struct.pack("<Q", len(nested)) + nested,
        f"{first} is of type U32, which is not read": damage_header(content, first, dtype="U32"),
        "its header is damaged: .* starts at byte": damage_header(
            content, second, shape=[50, 48], data_offsets=offsets
        ),
    }
    for message, changed in broken.items():
        file.write_bytes(changed)
        with pytest.raises(PrimusError, match=message):
            open_checkpoint(str(hub))
    file.write_bytes(content)
    (hub / CONFIG).write_bytes(nested)
    with pytest.raises(PrimusError, match=r"config.json: damaged: maximum recursion"):
        open_checkpoint(str(hub))


def test_a_tensor_of_a_rank_that_is_not_of_the_model_is_refused(tmp_path: Path) -> None:
    spec = make_spec()
    target = write(draw_hub_tensors(spec), spec, tmp_path / "ranks", TargetSettings("megatron", format="torch"))
    (file,) = target.glob("*/mp_rank_00/*.pt")
    state = torch.load(file, weights_only=True)
    state["model"]["rotary_pos_emb.inv_freq"] = torch.ones(4)
    torch.save(state, file)
    open_checkpoint(str(target))
    state["model"]["decoder.layers.0.mlp.gate"] = torch.ones(4)
    torch.save(state, file)
    with pytest.raises(PrimusError, match=r"1 tensors are not part of the model, among them decoder.layers.0.mlp.gate"):
        open_checkpoint(str(target))


# Words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "megatron", "--format", "torch", "--ep", "2"], "--ep 2: this model has no experts"),
        (["--to", "huggingface", "--tokenizer", "{tmp}"], "no tokenizer.json in this folder"),
    ],
)
def test_an_option_without_effect_is_refused(hub: Path, tmp_path: Path, words: Any, message: str, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    words = [word.replace("{tmp}", str(tmp_path / "empty")) for word in words]
    assert main(["direct", "--", "checkpoint", "convert", str(hub), str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_nan_in_both_checkpoints_is_no_difference() -> None:
    nan = float("nan")
    ours, theirs = TensorDict({"a": torch.tensor([nan, 1.0, 2.0])}), TensorDict({"a": torch.tensor([nan, 1.0, 2.5])})
    assert compare_weights(ours, ours) == []
    (found,) = compare_weights(ours, theirs)
    assert (found.different, found.max_difference) == (1, 0.5)
    (found,) = compare_weights(ours, TensorDict({"a": torch.tensor([nan, nan, 2.0])}))
    assert (found.different, found.max_difference) == (1, float("inf"))
