"""Blackwell."""

from primus.machine.profile import Layer, Setting

RECIPES = "NVIDIA-NeMo/Megatron-Bridge Llama 3 recipes"

LAYER = Layer(
    name="sm100",
    parent="nvidia",
    settings={
        "CUDA_DEVICE_MAX_CONNECTIONS": Setting(
            value="32", reason="streams need not share a queue to overlap", source=RECIPES
        ),
        "NCCL_NVLS_ENABLE": Setting(
            value="0", reason="memory for the model rather than for faster all-reduce in the switch", source=RECIPES
        ),
        "NVTE_FWD_LAYERNORM_SM_MARGIN": Setting(
            value="20", reason="multiprocessors left to communication", source=RECIPES
        ),
        "NVTE_BWD_LAYERNORM_SM_MARGIN": Setting(
            value="20", reason="multiprocessors left to communication", source=RECIPES
        ),
    },
)
