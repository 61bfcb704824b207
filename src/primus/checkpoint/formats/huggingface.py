"""Folders of Hugging Face: weights in shards with an index, config.json, tokenizer files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from primus.checkpoint.family import choose_family, list_copies, list_hub_shapes
from primus.checkpoint.formats.safetensors_file import SafetensorsFile, build_header
from primus.checkpoint.formats.tensor_bytes import write_tensor
from primus.checkpoint.output import OutputFile, OutputPlan, split_rows
from primus.checkpoint.quantized import DequantizedWeights
from primus.checkpoint.views import RenamedWeights
from primus.checkpoint.weights import TensorInfo, WeightReader
from primus.config.schema import ModelSpec
from primus.errors import PrimusError, UsageError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 << 30
"""Tensor data in one shard, as transformers writes (`max_shard_size`)."""

GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
PICKLE_INDEX = "pytorch_model.bin.index.json"
PICKLES = "pytorch_model*.bin"
HEAD = "lm_head.weight"
BASE_PREFIX = "model."
"""Of all weights except the head; transformers' models without a head (`AutoModel`) save names without it."""
OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
"""Beginnings of names in files of a multimodal model that its language model does not have (Gemma 3)."""
SAME_WEIGHTS = {"MistralForCausalLM": "LlamaForCausalLM"}
"""Classes in transformers whose weights have the names and shapes of another class."""


class SafetensorsFolder:
    """All tensors of a folder of safetensors files, or of one file.

    Raises:
        PrimusError: A shard is missing or damaged, or lacks a tensor of the index.
    """

    def __init__(self, path: Path) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for file, names in list_shards(path).items():
            opened = SafetensorsFile(file)
            found = opened.list_tensors()
            check_shard(file, names, found)
            for name in found:
                if name in self._files:
                    raise PrimusError(f"{name} is in {self._files[name].path.name} and in {file.name}")
                self._files[name] = opened
            self._tensors |= found

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._files[name].read(name, rows)


class PickleFolder:
    """All tensors of a folder of `pytorch_model*.bin` files, or of one file.

    The files are loaded with `weights_only`, so that no code of theirs is run even if they are trusted.

    Raises:
        PrimusError: They are not trusted, or a shard is missing or damaged, or lacks a tensor of the index.
    """

    def __init__(self, path: Path, trust_pickle: bool) -> None:
        from primus.checkpoint.formats.torch_file import FileTensor, load_state_without_data, locate_tensors, read_rows

        shards = list_shards(path, PICKLE_INDEX, (PICKLES,))
        if not trust_pickle:
            raise PrimusError(
                f"{path}: its weights are pickles, such as {min(shards).name}, and no *.safetensors",
                "if you trust who wrote them: `checkpoint convert SOURCE TARGET --to huggingface --trust-pickle`",
            )
        self._read_rows = read_rows
        self._tensors: dict[str, FileTensor] = {}
        for file, names in shards.items():
            state = load_state_without_data(
                file, trust_pickle=False, hint="load it where you trust it, and save its state_dict()"
            )
            if not isinstance(state, dict):
                raise PrimusError(f"{file}: has no tensors by name", "save a model's state_dict()")
            found = locate_tensors(state, file)
            check_shard(file, names, found)
            self._tensors |= found

    def list_tensors(self) -> dict[str, TensorInfo]:
        return {name: tensor.info for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._read_rows(self._tensors[name], rows)


def check_shard(file: Path, names: Collection[str], found: Collection[str]) -> None:
    """Check that a file has the tensors that the index names.

    Raises:
        PrimusError: Names the first that it lacks.
    """
    missing = sorted(set(names) - set(found))
    if missing:
        raise PrimusError(f"{file}: lacks {missing[0]}, which the index lists", "copy the folder again")


def has_pickles_only(path: Path) -> bool:
    """Whether weights are in `pytorch_model*.bin` files, or `path` is such a file."""
    if path.is_file():
        return path.suffix == ".bin"
    return not any(path.glob("*.safetensors")) and any(path.glob(PICKLES))


class HuggingFaceWeights:
    """The weights of a model in a folder of Hugging Face, by hub names.

    Quantized tensors read as bfloat16. Copies of other tensors and what no model reads are excluded.

    Args:
        path: The folder, or one file.
        spec: The model.
        tensors: Its tensors by hub name, where they are not in safetensors files.

    Raises:
        PrimusError: A tensor is missing, has another shape, or is not one of the model.
    """

    def __init__(self, path: Path, spec: ModelSpec, tensors: WeightReader | None = None) -> None:
        shapes, copies = list_hub_shapes(spec), list_copies(spec)
        stored = tensors or SafetensorsFolder(path)
        self._weights = DequantizedWeights(RenamedWeights(stored, map_hub_names(stored.list_tensors(), shapes)))
        found = self._weights.list_tensors()
        check_tensors(found, shapes, copies, str(path))
        self._copies = {name: original for name, original in copies.items() if name in found and original in found}
        self._tensors = {name: found[name] for name in shapes}

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._weights.read(name, rows)

    def find_different_copy(self) -> str:
        """The first tensor that should be a copy of another one and differs; empty if there is none."""
        for name, original in self._copies.items():
            assert original is not None
            info = self._weights.list_tensors()[name]
            if any(
                not torch.equal(self._weights.read(name, rows), self._weights.read(original, rows))
                for rows in split_rows(info)
            ):
                return f"{name} differs from {original}, which it should copy"
        return ""


def check_copies(weights: WeightReader, where: str) -> None:
    """Refuse published copies of a tensor that differ from it: one of both would be lost.

    Raises:
        PrimusError: Names the copy.
    """
    difference = weights.find_different_copy() if isinstance(weights, HuggingFaceWeights) else ""
    if difference:
        raise PrimusError(
            f"{where}: {difference}",
            "if the model has a separate output head, set tie_word_embeddings: false in its config.json",
        )


def map_hub_names(found: Collection[str], shapes: Collection[str]) -> dict[str, str]:
    """The names in a file by hub name, behind the prefix of a wrapper, or without that of a model with a head.

    Of a multimodal model, those of its language model.
    """
    found = [name for name in found if not OTHER_PARTS.match(name)]
    first = next(iter(shapes))
    if first in found:
        return {name: name for name in found}
    prefix = find_prefix(found, first)
    if prefix:
        return {name.removeprefix(prefix): name for name in found}
    base = first.removeprefix(BASE_PREFIX)
    prefix = find_prefix(found, base)
    if base in found or prefix:
        names = {name: name.removeprefix(prefix) for name in found}
        return {name if name in shapes else BASE_PREFIX + name: stored for stored, name in names.items()}
    return {name: name for name in found}


def find_prefix(found: Collection[str], name: str) -> str:
    """What all names begin with before that of a tensor of the model; wrappers like DDP (`module.`) save it."""
    prefix = next((each.removesuffix(name) for each in found if each.endswith("." + name)), "")
    return prefix if all(each.startswith(prefix) for each in found) else ""


def check_tensors(
    found: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    others: Mapping[str, str | None],
    where: str,
) -> None:
    """Account for every tensor: none missing, none left over, all of the right shape.

    Raises:
        PrimusError: Names the first tensor that is wrong, and the number of others.
    """
    missing = [name for name in shapes if name not in found]
    if missing:
        raise PrimusError(
            f"{where}: {len(missing)} of {len(shapes)} tensors are missing, among them {missing[0]}",
            "if it was saved without its head (AutoModel), save it by AutoModelForCausalLM"
            if missing == [HEAD]
            else "check that it is complete, and of this model",
        )
    surplus = [name for name in found if name not in shapes and name not in others]
    if surplus:
        raise PrimusError(
            f"{where}: {len(surplus)} tensors are not part of the model, among them {surplus[0]}",
            "check that it is of this model",
        )
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise PrimusError(
                f"{where}: {name} has shape {list(found[name].shape)}; the model expects {list(shape)}",
                "check that it is of this model",
            )
        if not found[name].dtype.is_floating_point:
            raise PrimusError(
                f"{where}: {name} is {str(found[name].dtype).removeprefix('torch.')}, not a floating-point type",
                "convert the weights that it was quantized from",
            )


def list_shards(
    path: Path, index_name: str = INDEX, patterns: Sequence[str] = ("*.safetensors",)
) -> dict[Path, list[str]]:
    """Files of a folder with the tensors that its index names; without an index all its files.

    Raises:
        PrimusError: There are none, or one of the index is missing.
    """
    if path.is_file():
        return {path: []}
    # Where a folder has several, transformers reads the first of these, too (utils/hub.py).
    single = path / index_name.removesuffix(".index.json")
    if single.is_file():
        return {single: []}
    index = path / index_name
    if not index.is_file():
        files = sorted(file for pattern in patterns for file in path.glob(pattern))
        if not files:
            raise PrimusError(f"{path}: no {patterns[0]} file", "give a folder with weights")
        return {file: [] for file in files}
    try:
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[Path, list[str]] = {}
        for name, file in names.items():
            shards.setdefault(path / Path(file).name, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PrimusError(f"{index}: damaged: {error}") from None
    missing = sorted(file.name for file in shards if not file.is_file())
    if missing:
        raise PrimusError(
            f"{path}: {len(missing)} of {len(shards)} shards are missing, among them {missing[0]}",
            "copy or download them again",
        )
    return shards


# Writing


def plan_output(
    weights: WeightReader, spec: ModelSpec, others: Mapping[str, bytes], config: Mapping[str, Any] | None = None
) -> OutputPlan:
    """The files of a folder in this format.

    Args:
        weights: In hub names.
        spec: The model.
        others: The other files by name: tokenizer, ids of special tokens, model card.
        config: The config.json of this model, where the source has one: it may say more than `spec`.

    Raises:
        UsageError: transformers has no model like this.
    """
    generation = json.loads(others.get(GENERATION, b"{}"))
    text = format_config(spec, weights, config, {key: generation[key] for key in TOKEN_IDS if key in generation})
    tensors = dict(weights.list_tensors())
    shards = _split_shards(tensors)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = [
        OutputFile(name, sum(info.num_bytes for info in shard.values()), _ShardWriter(weights, shard))
        for name, shard in zip(names, shards, strict=True)
    ]

    def finish(folder: Path, _: Mapping[str, Any]) -> None:
        (folder / CONFIG).write_text(text, encoding="utf-8")
        if len(shards) > 1:
            total = sum(info.num_bytes for info in tensors.values())
            placed = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_files(folder, others)

    return OutputPlan(files, finish)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files into a folder."""
    for name, content in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def format_config(
    spec: ModelSpec,
    weights: WeightReader,
    config: Mapping[str, Any] | None = None,
    token_ids: Mapping[str, Any] | None = None,
) -> str:
    """The config.json of a model, with the type of most of its weights.

    Args:
        spec: The model.
        weights: In hub names.
        config: What it says besides; by default it is made from `spec`.
        token_ids: Ids of special tokens, where `config` has none.

    Raises:
        UsageError: transformers has no model like this.
    """
    values = dict(config if config is not None else _build_config(spec))
    values |= {key: value for key, value in (token_ids or {}).items() if values.get(key) is None}
    values.pop("quantization_config", None)  # weights are written as the values that they stand for
    sizes: dict[str, int] = {}
    for info in weights.list_tensors().values():
        name = str(info.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + info.num_bytes
    # transformers 4 reads torch_dtype, 5 reads dtype.
    values["torch_dtype"] = values["dtype"] = max(sizes, key=lambda name: sizes[name])
    return json.dumps(values, indent=2) + "\n"


def _build_config(spec: ModelSpec) -> dict[str, Any]:
    from primus.config.exports.hugging_face import format_model_config  # only for folders of Hugging Face

    values: dict[str, Any] = json.loads(format_model_config(spec).text)
    family = choose_family(spec)[1]
    architectures = {SAME_WEIGHTS.get(name, name) for name in values["architectures"]}
    if family.architecture not in architectures:
        raise UsageError(f"{family.architecture} expected, and {values['architectures']} written")
    return values


def _split_shards(tensors: Mapping[str, TensorInfo]) -> list[dict[str, TensorInfo]]:
    """Tensors in their order, at most `SHARD_BYTES` together."""
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.num_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.num_bytes
    return shards


class _ShardWriter:
    """Writes one file: the header is known before the tensors."""

    def __init__(self, weights: WeightReader, tensors: Mapping[str, TensorInfo]) -> None:
        self._weights, self._tensors = weights, tensors

    def __call__(self, file: BinaryIO, report: Callable[[int], None]) -> None:
        # transformers refuses files without this entry.
        file.write(build_header(self._tensors, {"format": "pt"}))
        for name, info in self._tensors.items():
            written = 0
            for rows in split_rows(info):
                count = write_tensor(file, self._weights.read(name, rows).to(info.dtype))
                written += count
                report(count)
            assert written == info.num_bytes, f"{name}: {written} of {info.num_bytes} bytes read"
