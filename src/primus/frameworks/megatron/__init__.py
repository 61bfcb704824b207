"""Megatron: megatron-core with the loop, data, schedule, reports and checkpoints of primus."""

ENGINES = ("megatron",)
STAGES = ("pre_trainer", "post_trainer")
USES_TORCH = True
