"""What every NVIDIA GPU gets."""

from primus.machine.profile import ProfileLayer, Setting

RECIPES = "NVIDIA-NeMo/Megatron-Bridge recipes"

LAYER = ProfileLayer(
    name="nvidia",
    parent="gpu",
    settings={
        "TORCH_NCCL_AVOID_RECORD_STREAMS": Setting(
            value="1",
            reason="memory of collectives is free again sooner; PyTorch does so by itself from 2.8 on, and warns of it",
            source=RECIPES,
            when="torch before 2.8",
        ),
        "PYTORCH_CUDA_ALLOC_CONF": Setting(
            value="expandable_segments:True", reason="less memory lost to fragments", source=RECIPES
        ),
        "NCCL_GRAPH_REGISTER": Setting(
            value="0", reason="CUDA graphs fail with expandable segments otherwise before sm100", source=RECIPES
        ),
    },
)
