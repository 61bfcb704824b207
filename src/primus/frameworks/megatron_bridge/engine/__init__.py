"""The driver: the only part that imports the library of the framework."""
