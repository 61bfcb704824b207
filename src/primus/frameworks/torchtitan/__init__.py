"""TorchTitan: its trainer, built from Python, with the data, schedule, reports and checkpoints of primus."""

ENGINES = ("torchtitan",)
USES_TORCH = True
