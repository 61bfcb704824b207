"""`python FILE MODULE WORDS`: runs a module of primus as `python -m` does, but for the working folder.

`python -m` looks for modules there first, and it may hold another `primus`, as a checkout of the existing system does.
"""

from __future__ import annotations

import os
import sys


def command(python: str, module: str, *words: str) -> tuple[str, ...]:
    """The command that runs `module` with `words`."""
    return python, __file__, module, *words


if __name__ == "__main__":
    own_folder = os.path.dirname(os.path.realpath(__file__))  # which Python has put where the working folder would be
    sys.path[:] = [place for place in sys.path if place != own_folder]
    del sys.argv[0]

    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
