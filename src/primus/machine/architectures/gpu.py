"""What every machine with GPUs gets."""

from primus.machine.profile import ProfileLayer, Setting

LAYER = ProfileLayer(
    name="gpu",
    parent="base",
    settings={
        "TORCH_NCCL_HIGH_PRIORITY": Setting(
            value="1",
            reason="communication goes before computation that waits for it",
            source="AMD-AGI/Primus base_env.sh; NVIDIA-NeMo/Megatron-Bridge recipes",
        ),
    },
)
