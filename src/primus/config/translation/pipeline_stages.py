"""Layers on pipeline stages, where the number of stages does not divide them.

Source: megatron/core/transformer/pipeline_parallel_layer_layout.py of Megatron-LM 0.16 (`parse_str_to_list`).
"""

from __future__ import annotations

from primus.config.translation.foreign_settings import ForeignSettings

STAGE_SETTINGS = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    }
)
"""Arguments of Megatron-LM that place layers on pipeline stages."""
VIRTUAL_STAGES = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    "virtual_pipeline_model_parallel_size",
)
LAYOUT = "pipeline_model_parallel_layout"


def place_layers(work: ForeignSettings) -> None:
    """Set Megatron-LM's layout of stages where the layers do not divide and nothing else places them.

    Megatron-LM stops there. The embedding and the head count as a layer each, as in its options
    `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`: for this reason Llama 3.1 405B
    has 126 layers (arXiv:2407.21783, section 3.3.2).
    """
    stages, layers = work.read("pipeline_model_parallel_size", 1), work.read("num_layers")
    predicted = work.read("mtp_num_layers", 0)
    if not all(type(each) is int for each in (stages, layers, predicted)) or stages < 2 or layers % stages == 0:
        return
    if layers < stages or any(work.read(key) for key in (*STAGE_SETTINGS, *VIRTUAL_STAGES)):
        return
    layout = format_layout(layers, stages, predicted)
    work.put(LAYOUT, layout, "primus: stages of like size")
    work.notes.append(
        f"pipeline_model_parallel_size {stages} does not divide num_layers {layers}, which Megatron-LM refuses:"
        f" {LAYOUT} is set to {layout}"
    )


def format_layout(num_layers: int, num_stages: int, num_predicted: int = 0) -> str:
    """A layout with stages of like size: ``Et*2|t*3|t*2L``.

    Args:
        num_layers: Transformer layers, at least as many as stages.
        num_stages: Pipeline stages.
        num_predicted: Layers of multi-token prediction, which stand on the last stage.
    """
    each, more = divmod(num_layers + num_predicted + 2, num_stages)
    sizes = [each + (stage < more) for stage in range(num_stages)]
    sizes[0] -= 1
    sizes[-1] -= 1 + num_predicted
    # Each stage needs a layer: a last stage of predictions alone takes one from the first that can spare it.
    while min(sizes) < 1:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(min(sizes))] += 1
    stages = [f"t*{size}" for size in sizes]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "m" * num_predicted + "L"
    return "|".join(stages)
