"""Encode text into token files."""
