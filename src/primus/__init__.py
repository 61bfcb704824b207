"""One entry point for LLM training work: the command `primus-cli`, and a Python API (docs/python-api.md)."""

__version__ = "0.1.0"

SITE_ADDRESS = ""
"""Where docs/ are published, with a slash at the end; empty as long as they are not. The site and the first line of
experiment files that name the schema use it."""

# Types are in __init__.pyi: imports here, even for types alone, would point up.
_PLACES = {
    "primus.api": (
        *("prepare", "open_run", "open_runs"),
        *("CommandOutcome", "PreparedCommand", "RunningCommand", "RecordedRun", "RunCollection"),
    ),
    "primus.errors": ("PrimusError", "UsageError", "UnfitError", "FinalError"),
}
__all__ = ["__version__", *(name for names in _PLACES.values() for name in names)]


def __getattr__(name: str) -> object:
    """Import a name of the API on its first use: every command and worker imports this package."""
    for module, names in _PLACES.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'primus' has no attribute '{name}'")
