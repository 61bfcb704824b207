"""Tokenizers: their contract (`tokenizer`), loading one by name (`load`), and the libraries that encode."""
