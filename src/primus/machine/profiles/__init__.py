"""GPU models, one YAML file each, and the schema of these files."""
