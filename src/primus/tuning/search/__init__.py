"""Searches for settings by short measured trials: their studies, and successive halving."""
