"""Checks whether nodes are fit for a long job."""
