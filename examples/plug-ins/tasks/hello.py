"""Say hello."""

from msgspec import Struct

from primus.config.flags import Positional
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `hello`."""

    name: Positional = "world"
    """Whom to greet."""
    loud: bool = False
    """Add an exclamation mark."""


def run(options: Options, context: TaskContext) -> None:
    """Print the greeting; `context.result` prints JSON under `--json`."""
    greeting = f"hello {options.name}{'!' * options.loud}"
    context.result({"greeting": greeting}, greeting)
