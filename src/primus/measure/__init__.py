"""Measurements of devices and their connections; the only part of preflight and benchmarks that needs torch."""
