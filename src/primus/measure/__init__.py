"""Measure devices and what connects them; the only part of preflight and of benchmarks that needs torch."""
