"""What tests of launches share."""

from __future__ import annotations

import pytest

from fakes import cli


@pytest.fixture
def port() -> int:
    """A port of this machine that nobody uses now."""
    return cli.find_free_port()
