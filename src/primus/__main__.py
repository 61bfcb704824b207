"""`python -m primus` is `primus-cli`."""

from __future__ import annotations

import sys

from primus.errors import EXIT_UNFIT

if __name__ == "__main__":
    try:
        from primus.cli.main import main
    except ModuleNotFoundError as error:
        if (error.name or "primus").partition(".")[0] == "primus":
            raise
        # Such as `ssh --python` with an interpreter that only other hosts have set up.
        print(
            f"primus-cli: {sys.executable} (Python {sys.version.split()[0]}) has no package {error.name}\n"
            f"  name another Python, or install it there: {sys.executable} -m pip install {error.name}",
            file=sys.stderr,
        )
        sys.exit(EXIT_UNFIT)
    sys.exit(main())
