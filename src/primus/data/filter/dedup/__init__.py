"""Removal of documents that repeat earlier ones, exactly or nearly."""
