"""One entry point for LLM training work."""

__version__ = "0.1.0"
