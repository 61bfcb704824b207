"""Hugging Face Transformers: its modelling code, trained by PyTorch with our loop, to compare with."""

ENGINES = ("huggingface",)
USES_TORCH = True
