"""Start Python programs that do not import modules from the working folder.

`python -m MODULE` and `python -c CODE` look for modules in the working folder first. A user may have a `random.py`
there, a `torch.py` or a checkout with a folder `primus`. Python 3.11 has the option `-P` for this; this file also works
with 3.10:

    python interpreter.py MODULE ARGUMENT...    like `python -m`, without the working folder
    python interpreter.py -c CODE               like `python -c`, without the working folder

The package `primus` is that of this file, also where the interpreter is that of an engine's environment, which may find
another one. Folders in PYTHONPATH are kept. Its empty entries, which mean the working folder and result from
`PYTHONPATH=$PYTHONPATH:DIR`, are removed.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def build_module_command(python: str, module: str, *args: str) -> tuple[str, ...]:
    """The command that runs `module` with `args`."""
    return python, __file__, module, *args


def build_code_command(python: str, code: str) -> tuple[str, ...]:
    """The command that runs `code`."""
    return python, __file__, "-c", code


def drop_empty_python_path(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with a PYTHONPATH of named folders only: the interpreter reads it before it runs any code of primus."""
    cleaned = dict(environ)
    if "PYTHONPATH" in cleaned:
        cleaned["PYTHONPATH"] = os.pathsep.join(_list_named_folders(cleaned["PYTHONPATH"]))
    return cleaned


NUM_ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000
USUAL_THRESHOLD = gc.get_threshold()


def reduce_garbage_collection() -> None:
    """Collect garbage rarely in this process, and not at its exit, where collections take 10 % of a short command."""
    gc.set_threshold(NUM_ALLOCATIONS_BETWEEN_COLLECTIONS)
    # Finalization collects several times. Frozen objects are skipped, and the system frees them with the process.
    atexit.register(gc.freeze)


def restore_garbage_collection() -> None:
    """Collect garbage as usual from here on: in a training, cycles of objects hold memory of the device."""
    gc.set_threshold(*USUAL_THRESHOLD)


def exclude_working_folder() -> None:
    """Import nothing from the working folder in this process, unless PYTHONPATH names it or this package is there."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the working folder was deleted
        here = ""
    named = [os.path.realpath(entry) for entry in _list_named_folders(os.environ.get("PYTHONPATH", ""))]
    source = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    is_kept = os.path.realpath(here) in (*named, source)
    sys.path[:] = [entry for entry in sys.path if entry and (is_kept or entry != here)]


def exclude_working_folder_of_children() -> None:
    """Have children of multiprocessing (spawn, forkserver, resource tracker) import nothing from the working folder.

    They are started by `python -c`, with the options of `multiprocessing.util._args_from_interpreter_flags`. `-I` also
    hides PYTHONPATH, until a child takes over the `sys.path` of its parent (multiprocessing/spawn.py,
    get_preparation_data).
    """
    from multiprocessing import util

    option = "-P" if sys.version_info >= (3, 11) else "-I"
    inherited = util._args_from_interpreter_flags  # type: ignore[attr-defined]
    if option not in inherited():
        util._args_from_interpreter_flags = lambda: [*inherited(), option]  # type: ignore[attr-defined]


def _import_own_package() -> None:
    """Let `primus` be imported from the folder of this file, after the standard library.

    If that folder is the site-packages of another environment, the other packages of this interpreter take precedence.
    """
    source = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    package = os.path.join("primus", "__init__.py")
    first = next((entry for entry in sys.path if os.path.exists(os.path.join(entry, package))), "")
    if os.path.realpath(first) == source:
        return
    is_site = source.endswith("-packages")
    sites = [index for index, entry in enumerate(sys.path) if entry.endswith("-packages")]
    sys.path.insert(len(sys.path) if is_site or not sites else sites[0], source)


def _list_named_folders(python_path: str) -> list[str]:
    return [entry for entry in python_path.split(os.pathsep) if entry]


if __name__ == "__main__":
    own_folder = os.path.dirname(os.path.realpath(__file__))  # which Python has put where the working folder would be
    sys.path[:] = [entry for entry in sys.path if entry != own_folder]
    exclude_working_folder()
    _import_own_package()
    del sys.argv[0]
    if sys.argv[0] == "-c":
        code = sys.argv.pop(1)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - what `python -c` does
    else:
        import runpy

        from primus import interpreter  # another module than this one, which is `__main__`

        interpreter.reduce_garbage_collection()  # importing torch takes a third less time
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
