"""Instruction data for fine-tuning: examples read, tokenized with a loss mask, and packed into samples."""
