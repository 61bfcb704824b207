"""The command line interface: arguments in, exit code out."""

from primus.quick_imports import import_msgspec

# Before any other module of this package imports it.
import_msgspec()
