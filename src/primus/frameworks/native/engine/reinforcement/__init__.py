"""Reinforcement learning: completions that the model generates, their rewards, and the losses of them."""
