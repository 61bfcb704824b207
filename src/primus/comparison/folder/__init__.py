"""A comparison on disk: its folder, archives of it, and what a purge removes."""
