"""Tasks for checkpoints of any format."""
