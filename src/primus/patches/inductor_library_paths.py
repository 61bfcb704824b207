"""torch.compile on a CPU works where torch lies in a folder whose path has a space.

`CppBuilder` of torch/_inductor/cpp_builder.py puts a library folder into the compiler's command line as it stands,
unlike an include folder, which it quotes; the line is then split as a shell would, and g++ cannot find -ltorch.
"""

from __future__ import annotations

import shlex
from datetime import date
from importlib.util import find_spec
from typing import Any

from primus.patch import Patch

PATCH = Patch(
    target="torch",
    versions=">=2.13,<2.14",
    reason="Inductor does not quote library folders, so nothing compiles where torch's path has a space",
    link="https://github.com/pytorch/pytorch/pull/191010",
    expires=date(2027, 6, 30),
)


def is_needed() -> bool:
    """Whether the path of torch has a space."""
    torch = find_spec("torch")
    return bool(torch and torch.origin and " " in torch.origin)


def apply() -> None:
    """Have Inductor's build options give library folders as the command line needs them."""
    from torch._inductor.cpp_builder import BuildOptionsBase

    options: Any = BuildOptionsBase
    plain = options.get_libraries_dirs

    def quote_folders(self: Any) -> list[str]:
        return [shlex.quote(folder) for folder in plain(self)]

    options.get_libraries_dirs = quote_folders
