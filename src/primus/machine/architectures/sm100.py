"""Blackwell: as Hopper, but for its queues."""

from primus.machine.profile import Layer, Setting

LAYER = Layer(
    name="sm100",
    parent="sm90",
    settings={
        "CUDA_DEVICE_MAX_CONNECTIONS": Setting(
            value="32",
            reason="streams need not share a queue to overlap",
            source="NVIDIA-NeMo/Megatron-Bridge Llama 3 recipes",
        ),
    },
)
