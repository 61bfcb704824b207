"""How long work reports to the user: one line at a time, through a function that its caller passes."""

from collections.abc import Callable

Say = Callable[[str], None]
"""Receives one line of progress, without a line break; the caller decides where it appears."""
