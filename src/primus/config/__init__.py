"""The experiment's configuration: one typed schema, loaded from YAML with the origin of every value."""
