"""Tokenizers: their interface (`tokenizer`), loading by name (`load`), and the engines that encode."""
