"""Variables of hipBLASLt that name files of tuned solutions."""

from __future__ import annotations

HIPBLASLT_VARIABLE = "HIPBLASLT_TUNING_OVERRIDE_FILE"
"""File of solutions that hipBLASLt uses instead of its heuristic (hipBLASLt documentation, offline tuning)."""
RUNTIME_TUNING, RUNTIME_CACHE = "HIPBLASLT_TUNING_MODE", "HIPBLASLT_TUNING_CACHE_PATH"
"""With a mode of `cache` or `tune`, newer versions of hipBLASLt read the solutions of this cache, whose rows are those
of a tuning file, and ignore the override file (hipBLASLt documentation, runtime tuning)."""
RUNTIME_MODES = ("off", "cache", "tune")
