"""Search for settings by short measured trials."""
