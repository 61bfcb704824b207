"""Long tests under load: burn-in, host memory, a reference training."""
