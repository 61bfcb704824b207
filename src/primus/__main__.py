"""`python -m primus` is `primus-cli`."""

from __future__ import annotations

import sys

from primus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
