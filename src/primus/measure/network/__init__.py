"""What ranks exchange: groups of them, collectives, and pairs."""
