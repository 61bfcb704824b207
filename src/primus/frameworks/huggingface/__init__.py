"""Hugging Face Transformers: its modelling code, trained by PyTorch with our loop, to compare with."""

from primus.frameworks.huggingface.support import KEYS as KEYS

ENGINES = ("huggingface",)
USES_TORCH = True
