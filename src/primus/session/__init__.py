"""What every training engine shares: data, schedule, reports, checkpoints and the loop of steps."""
