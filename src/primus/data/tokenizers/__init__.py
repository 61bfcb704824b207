"""Kinds of tokenizers, and the fast way to encode with them; `primus.data.tokenizer` is the contract and the door."""
