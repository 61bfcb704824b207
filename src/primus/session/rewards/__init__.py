"""Rewards of completions, computed in a process of their own."""
