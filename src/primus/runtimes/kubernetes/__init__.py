"""Run on Kubernetes (k8s for short)."""

from __future__ import annotations

from primus.runtimes.kubernetes.options import COMMANDS, Options, parse

__all__ = ["COMMANDS", "LEVEL", "Options", "parse"]

LEVEL = "cluster"
