"""What a training run reports: lines, events, the progress bar, and loggers."""
