"""Packages of the experiment trackers that a configuration asks for."""

from __future__ import annotations

from primus.config.schema import LoggingConfig


def list_tracker_packages(config: LoggingConfig) -> tuple[str, ...]:
    """Packages that the workers import for their trackers; TensorBoard is not among them, since runs do without it."""
    given = (("wandb", config.disable_wandb), ("mlflow", config.disable_mlflow))
    return tuple(package for package, is_off in given if not is_off)


def format_missing_package(package: str) -> str:
    """The problem in words."""
    return f"disable_{package} is false, but the package {package} is not installed"
