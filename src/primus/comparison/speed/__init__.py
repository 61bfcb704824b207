"""Speeds of cells and their ratios with intervals, and what tokens cost."""
