"""Tokens for training: named sources, tokenizers, Megatron .bin/.idx files, packing, and a loader that resumes."""
