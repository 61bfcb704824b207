"""Cleaning of documents: rules by name, and the words that they and deduplication count."""
