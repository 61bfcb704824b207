"""The memory and the time of a training step, predicted from shapes before any GPU runs it."""
