"""Cleaning of documents: the rules, and the word splitting that deduplication also uses."""
